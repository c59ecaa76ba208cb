"""Published versions in files: when the trainer writes them, and that their number is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from forge.runtime.coordination import Instance
from forge.runtime.files import host_memory
from forge.runtime.weights import DIRECTORY_WAY, MEMORY_KEY, WeightAnnouncement, manifest_key
from services.trainer.published.local_copies import LocalCopies
from services.trainer.published.publisher import Publisher
from services.trainer.published.versions import PublishedVersions
from tests.support.trainer.published_weights import FakeRegister, fetch, snapshot


class Trainer:
    """A publisher whose discovery has one worker."""

    def __init__(self, *, memory_of_worker: str, directory: str = "") -> None:
        async def workers() -> Sequence[Instance]:
            metadata = {MEMORY_KEY: memory_of_worker}
            return [
                Instance(kind="decode", instance_id="d", address="", metadata=metadata, revision=0)
            ]

        self.register = FakeRegister()
        self.versions = PublishedVersions(kept=2)
        self.copies = LocalCopies(workers=workers, directory=directory)
        self.publisher = Publisher(
            self.register, self.versions, source="host:1", floor=0, copies=self.copies
        )

    async def publish(self, step: int) -> tuple[str, ...]:
        """Publish; returns the announced ways."""
        await self.publisher.publish(snapshot(step))
        return WeightAnnouncement.decode(self.register.entries[manifest_key()].value).ways


async def test_memory_is_used_while_a_worker_shares_it(memory: Path) -> None:
    """As many files as versions are kept; the trainer sends over gRPC from the same memory."""
    trainer = Trainer(memory_of_worker=host_memory.place())
    for step in range(1, 5):
        assert await trainer.publish(step) == (host_memory.place(),)
    assert len(list(memory.iterdir())) == 2
    assert [(await fetch(trainer.versions.weights, one))[0].data[0] for one in (3, 4)] == [3, 4]
    trainer.copies.keep(())
    assert not list(memory.iterdir())
    elsewhere = Trainer(memory_of_worker="another host")
    assert await elsewhere.publish(1) == () and not list(memory.iterdir())


async def test_version_without_room_is_published_over_grpc(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, and announced without the way; a missing directory is no reason to stop either."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    labels = {"way": "memory", "outcome": "failed"}
    before = REGISTRY.get_sample_value("forge_trainer_weight_files_total", labels) or 0.0
    trainer = Trainer(memory_of_worker=host_memory.place(), directory=str(tmp_path / "missing"))
    assert await trainer.publish(1) == ()
    assert REGISTRY.get_sample_value("forge_trainer_weight_files_total", labels) == before + 1
    assert (await fetch(trainer.versions.weights, 1))[0].data[0] == 1


async def test_directory_has_each_version(memory: Path, tmp_path: Path) -> None:
    """Beside the memory, for the workers of other hosts."""
    shared = tmp_path / "shared"
    shared.mkdir()
    trainer = Trainer(memory_of_worker=host_memory.place(), directory=str(shared))
    assert await trainer.publish(1) == (DIRECTORY_WAY, host_memory.place())
    assert len(list(shared.iterdir())) == len(list(memory.iterdir())) == 1
    trainer.copies.keep(())
