"""Versions only rise, announced weights can be had, and a second trainer is noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import structlog
from xxhash import xxh3_64_digest

from forge.core.errors import NotFound, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.weights import WeightManifest, content_digest
from services.trainer.published.files import HELD_DIRECTORY, VersionNumber
from services.trainer.published.publisher import Publisher, Snapshot, Superseded
from services.trainer.published.versions import PublishedVersions
from tests.support.trainer.published_weights import FakeRegister, fetch, snapshot


def publisher(
    register: FakeRegister,
    *,
    source: str = "host:1",
    floor: int = 0,
    versions: PublishedVersions | None = None,
) -> Publisher:
    return Publisher(register, versions or PublishedVersions(kept=2), source=source, floor=floor)


async def test_announcement_is_small_and_names_the_manifest() -> None:
    """etcd has its sha256; the manifest has types, shapes, digests of slices and tied names."""
    register = FakeRegister()
    data = bytes((1 << 20) + 5)
    tensor = NamedTensor(name="w", dtype="uint8", shape=(len(data),), data=data)
    versions = PublishedVersions(kept=2)
    own = publisher(register, versions=versions)
    tied = Snapshot(step=7, tensors=[tensor], aliases={"w": ["lm_head.weight"]})
    assert await own.publish(tied) == 1
    held = versions.weights[1]
    manifest = WeightManifest.decode(held.manifest)
    assert register.manifest == {
        "weight_version": 1,
        "step": 7,
        "total_bytes": len(data),
        "digest": content_digest(manifest.tensors),
        "source": "host:1",
        "manifest": hashlib.sha256(held.manifest).hexdigest(),
    }
    (entry,) = manifest.tensors
    assert (entry.name, entry.dtype, entry.shape) == ("w", "uint8", (len(data),))
    assert entry.digest(0) == xxh3_64_digest(data[: 1 << 20])
    assert entry.digest(1) == xxh3_64_digest(bytes(5))
    assert entry.aliases == ("lm_head.weight",)


async def test_restarted_trainer_continues_the_weight_versions() -> None:
    """Above the announced version, and above its checkpoint's if etcd was lost."""
    register = FakeRegister()
    for step in range(3):
        await publisher(register).publish(snapshot(step))
    assert await publisher(register, source="host:2").publish(snapshot(0)) == 4
    assert await publisher(FakeRegister(), floor=9).publish(snapshot(0)) == 10


async def test_restarted_trainer_continues_above_its_versions_that_etcd_has_forgotten(
    tmp_path: Path,
) -> None:
    """etcd is restored from an older snapshot, the newest checkpoint is older, and no worker is in
    discovery: a worker that returns with such a version would keep other weights."""

    def started(register: FakeRegister) -> Publisher:
        return Publisher(
            register,
            PublishedVersions(kept=2),
            source="host:1",
            floor=1,
            number=VersionNumber(tmp_path),
        )

    register = FakeRegister()
    own = started(register)
    assert [await own.publish(snapshot(step)) for step in range(2)] == [2, 3]
    register.away = True
    with pytest.raises(Unavailable):
        await own.publish(snapshot(2))
    register.away, register.lose_answer = False, True
    with pytest.raises(Unavailable):
        await own.publish(snapshot(3))
    assert await started(FakeRegister()).publish(snapshot(0)) == 5
    (tmp_path / HELD_DIRECTORY / "version-00000009").mkdir(parents=True)
    assert await started(FakeRegister()).publish(snapshot(0)) == 10


@pytest.mark.parametrize("content", [b"", b"\xff", b"-3", b"many"])
async def test_number_on_a_damaged_disk_stops_no_publication(
    tmp_path: Path, content: bytes
) -> None:
    """etcd has it, too."""
    (tmp_path / "weight-version").write_bytes(content)
    for directory, found in ((tmp_path, 1), (tmp_path / "absent", 0)):
        own = Publisher(
            FakeRegister(),
            PublishedVersions(kept=2),
            source="host:1",
            floor=0,
            number=VersionNumber(directory),
        )
        assert await own.publish(snapshot(0)) == 1
        assert VersionNumber(directory).highest() == found


async def test_version_with_an_unknown_outcome_is_never_used_again() -> None:
    """If the answer is lost, the next publication takes a higher number."""
    register = FakeRegister()
    own = publisher(register)
    register.lose_answer = True
    with pytest.raises(Unavailable):
        await own.publish(snapshot(1))
    register.lose_answer = False
    assert await own.publish(snapshot(2)) == 2
    register.away = True
    with pytest.raises(Unavailable):
        await own.publish(snapshot(3))
    register.away = False
    assert await own.publish(snapshot(4)) == 3


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("arrives", ["at once", "before the next", "within the next", "never"])
async def test_number_names_the_same_weights_after_a_lost_answer(
    monkeypatch: pytest.MonkeyPatch, arrives: str, restarts: bool
) -> None:
    """Whenever etcd makes the swap whose answer was lost, and if the trainer restarts with the
    floor of a checkpoint before it: workers read each number once, and publication continues."""
    register = FakeRegister()
    own = publisher(register)
    await own.publish(snapshot(1))
    register.lose_answer = arrives == "at once"
    register.delay = not register.lose_answer
    with pytest.raises(Unavailable):
        await own.publish(snapshot(2))
    register.lose_answer = register.delay = False
    if arrives == "before the next":
        await register.arrive()
    if restarts:
        own = publisher(register, source="host:2", floor=1)
    if arrives == "within the next":
        prepare = own._prepare

        async def late(*arguments: Any) -> Any:
            await register.arrive()
            return await prepare(*arguments)

        monkeypatch.setattr(own, "_prepare", late)
        with pytest.raises(Unavailable, match="changed before version"):
            await own.publish(snapshot(3))
    last = await own.publish(snapshot(4))
    await register.arrive()
    numbers = [number for number, _ in register.announced]
    assert numbers == sorted(set(numbers))
    assert register.manifest["weight_version"] == last == numbers[-1]
    assert register.manifest["step"] == 4


async def test_failed_publication_takes_no_place_of_an_announced_version() -> None:
    """The next publication drops its data, unless its announcement is in etcd nevertheless."""
    register, versions = FakeRegister(), PublishedVersions(kept=2)
    own = publisher(register, versions=versions)
    await own.publish(snapshot(1))
    compare_and_swap = register.compare_and_swap

    async def fail(*_: object, **__: object) -> int:
        raise Unavailable("etcd does not answer")

    for step in (2, 3):
        register.compare_and_swap = fail  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await own.publish(snapshot(step))
    register.compare_and_swap = compare_and_swap  # type: ignore[method-assign]
    assert await own.publish(snapshot(4)) == 4
    assert [one.weight_version for one in versions.published] == [1, 4]
    assert sorted(versions.weights) == [1, 4]
    register.lose_answer = True
    with pytest.raises(Unavailable):
        await own.publish(snapshot(5))
    register.lose_answer = False
    with structlog.testing.capture_logs() as logged:
        assert await own.publish(snapshot(6)) == 6
    assert [one.weight_version for one in versions.published] == [5, 6]
    assert [(one["event"], one["weight_version"], one["step"]) for one in logged] == [
        ("weights_published", 5, 5),
        ("weights_published", 6, 6),
    ]


async def test_older_trainer_cannot_announce_over_a_newer_one() -> None:
    """It may not announce over what a newer one announced."""
    register = FakeRegister()
    older, newer = publisher(register, source="host:1"), publisher(register, source="host:2")
    await older.publish(snapshot(1))
    await newer.publish(snapshot(0))
    with pytest.raises(Superseded, match="host:2, published version 2"):
        await older.publish(snapshot(2))
    assert register.manifest["source"] == "host:2"


async def test_last_versions_can_be_fetched() -> None:
    """A worker in a fetch is not cut off by the next version; pinned ones stay beside them."""
    versions = PublishedVersions(kept=2)
    own = publisher(FakeRegister(), versions=versions)
    with pytest.raises(NotFound, match="no weights"):
        await fetch(versions.weights, 1)
    await own.publish(snapshot(1))
    versions.pin({1})
    for step in (2, 3, 4):
        await own.publish(snapshot(step))
    held = (1, 3, 4)
    assert [(await fetch(versions.weights, one))[0].data[0] for one in held] == [1, 3, 4]
    with pytest.raises(NotFound, match="weight_version 2 is not held here"):
        await fetch(versions.weights, 2)
    versions.pin(())
    assert [one.weight_version for one in versions.published] == [3, 4]
