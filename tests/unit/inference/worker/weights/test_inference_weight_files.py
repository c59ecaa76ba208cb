"""Versions in shared memory and in a shared directory: real files, planted and damaged ones."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from forge.runtime.files import host_memory
from forge.runtime.weights import DIRECTORY_WAY, MEMORY_KEY
from forge.runtime.weights.version_files import VersionFiles
from tests.support.inference.weight_sources import Source, Worker, announcement_of, tensors_of

WEIGHTS = {"a": bytes(range(256)) * 8192, "b": b"tail", "c": b""}


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[tuple[Source, str]]:
    """A source of the manifest, and of the data over gRPC."""
    source = Source()
    source.held[1] = WEIGHTS
    yield source, await source.start()
    await source.stop()


def written(directory: Path, *, mapped: bool = True) -> Path:
    """Version 1 as a trainer writes it."""
    manifest = announcement_of(1, WEIGHTS, source="").manifest
    # Its lock lasts as long as the descriptor, which the object keeps.
    WRITERS.append(VersionFiles(directory, mapped=mapped))
    WRITERS[-1].write(1, manifest, tensors_of(WEIGHTS))
    (path,) = directory.iterdir()
    return path


WRITERS: list[VersionFiles] = []


def refused(way: str) -> float:
    return (
        REGISTRY.get_sample_value("forge_inference_weight_files_refused_total", {"way": way}) or 0.0
    )


@pytest.mark.parametrize("way", ["memory", "directory"])
async def test_worker_takes_a_version_from_a_file(
    memory: Path, tmp_path: Path, trainer: tuple[Source, str], way: str
) -> None:
    """The trainer sends the manifest alone; another worker gets the bytes from this one."""
    source, address = trainer
    shared = tmp_path / "shared"
    shared.mkdir()
    written(memory if way == "memory" else shared, mapped=way == "memory")
    worker = Worker(weights_dir=str(shared))
    assert worker.metadata[MEMORY_KEY] == host_memory.place() != ""
    ways = (DIRECTORY_WAY,) if way == "directory" else (host_memory.place(),)
    worker.publish(1, WEIGHTS, source=address, ways=ways)
    assert await worker.until_serving(1) == WEIGHTS
    assert not source.requests
    (held,) = worker.follower.weights.values()
    assert {one.name: bytes(one.data) for one in held.tensors} == WEIGHTS
    await worker.stop()


def _damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\xff\xff")


def _cut(path: Path) -> None:
    os.truncate(path, 5)


def _open_to_others(path: Path) -> None:
    path.chmod(0o644)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("spoil", [_damage, _cut, _open_to_others, _link, _pipe, Path.unlink])
async def test_spoiled_file_is_counted_and_the_version_comes_by_grpc(
    memory: Path, trainer: tuple[Source, str], spoil: Callable[[Path], None]
) -> None:
    """Damaged, short, readable by others, a link, a pipe, missing: no worker waits or ends."""
    source, address = trainer
    spoil(written(memory))
    before = refused("memory")
    worker = Worker()
    worker.publish(1, WEIGHTS, source=address, ways=(host_memory.place(), "another host"))
    assert await worker.until_serving(1) == WEIGHTS
    assert len(source.requests) == 1 and refused("memory") == before + 1
    await worker.stop()


async def test_file_of_another_user_is_refused(
    memory: Path, trainer: tuple[Source, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has the name that the trainer gives."""
    source, address = trainer
    written(memory)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    worker = Worker()
    worker.publish(1, WEIGHTS, source=address, ways=(host_memory.place(),))
    assert await worker.until_serving(1) == WEIGHTS
    assert len(source.requests) == 1
    await worker.stop()
