"""Weights that ranks publish in segments, over real servers: sources, losses, files and holds."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import ConfigError, ResourceExhausted, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.files import host_memory
from forge.runtime.rpc.server import RpcServer
from forge.runtime.weights import (
    DIRECTORY_WAY,
    FULL_NAME,
    MEMORY_KEY,
    WeightAnnouncement,
    WeightManifest,
    WeightServicer,
    manifest_key,
)
from forge.runtime.weights.delta import DeltaEncoder
from forge.runtime.weights.version_files import read_version, starts_of
from forge.v1 import inference_pb2_grpc as rpc
from services.trainer.actors.steering import Promote, RollBack
from services.trainer.learner import segment_orders, segment_server
from services.trainer.learner.segment_server import SegmentServer
from services.trainer.published.local_copies import LocalCopies
from services.trainer.published.publisher import Publisher
from tests.support.inference.weight_sources import SECURITY, Source, Worker
from tests.support.trainer.published_weights import FakeRegister
from tests.support.trainer.segments import SegmentGroup, segment_config
from tests.support.trainer.steering import SteeredTrainer

FIRST = {"a": bytes(2 << 20), "b": b"b" * 900_000, "c": bytes(range(256)) * 4096, "d": b"d" * 99}
SECOND = {name: b"\1" + data[1:] for name, data in FIRST.items()}


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are seen at once."""
    for module in (segment_orders, segment_server):
        monkeypatch.setattr(module, "LOOK_S", 0.002)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SegmentGroup]:
    """Three ranks."""
    started = SegmentGroup(tmp_path, 3)
    yield started
    started.stop()


@asynccontextmanager
async def publishing(trainer: SteeredTrainer) -> AsyncIterator[None]:
    """Context of rank 0's server."""
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)
    servicer = WeightServicer(lambda: trainer.versions.weights, deltas=DeltaEncoder())
    server.add_service(rpc.add_WeightServiceServicer_to_server, servicer, full_name=FULL_NAME)
    trainer.publisher._source = await server.start()
    yield
    await server.stop(grace_s=0)


def announced(register: FakeRegister) -> WeightAnnouncement:
    return WeightAnnouncement.decode(register.entries[manifest_key()].value)


def sent_bytes(rank: int) -> float:
    labels = {"rank": str(rank)}
    return REGISTRY.get_sample_value("forge_trainer_weight_sent_bytes_total", labels) or 0.0


async def test_worker_fetches_each_segment_from_its_rank(
    group: SegmentGroup, tmp_path: Path
) -> None:
    """The first version whole, the next one as deltas of every rank; each byte leaves one rank, and
    the ranks drop the versions that rank 0 drops."""
    trainer, before = SteeredTrainer(FakeRegister(), tmp_path / "held"), sent_bytes(1)
    async with publishing(trainer):
        subscriber = Worker(silence_s=60.0)
        for step, weights in enumerate((FIRST, SECOND), 1):
            await trainer.publisher.publish(group.snapshot(step, weights))
            subscriber._announcements.put_nowait(announced(trainer.register).encode())
            assert await subscriber.until_serving(step) == weights
        await subscriber.stop()
        found = announced(trainer.register)
        assert [one.first for one in found.segments] == [0, 1, 2]
        assert found.segments[0].source == found.source
        sent = {server._address: server._sent_bytes for server in group.servers}
        assert sent.keys() == {one.source for one in found.segments[1:]}
        for (_, total), names in zip(sent.items(), ("b", "cd"), strict=True):
            whole = sum(len(FIRST[name]) for name in names)
            assert whole < total < 1.1 * whole
        await trainer.publisher.publish(group.snapshot(3, FIRST))
        assert [sorted(one._held) for one in group.servers] == [[2, 3], [2, 3]]
    assert sent_bytes(1) - before == sent[found.segments[1].source]


async def test_fetch_continues_where_a_hung_rank_stopped(
    group: SegmentGroup, tmp_path: Path
) -> None:
    """After its deadline another worker that has the version sends the rest."""
    trainer, peer, hung = (
        SteeredTrainer(FakeRegister(), tmp_path / "held"),
        Source(),
        Source(hangs_after=0),
    )
    async with publishing(trainer):
        await trainer.publisher.publish(group.snapshot(1, FIRST))
        found = announced(trainer.register)
        moved = found.encode().replace(
            found.segments[1].source.encode(), (await hung.start()).encode()
        )
        peer.held[1] = FIRST
        subscriber = Worker()
        subscriber._announcements.put_nowait(moved)
        await hung.hung.wait()
        assert hung.requests[0].from_tensor == 1
        subscriber.show([await peer.start()], version=1)
        assert await subscriber.until_serving(1) == FIRST
        assert [one.from_tensor for one in peer.requests] == [1]
        await subscriber.stop()
    hung.go_on.set()
    for source in (peer, hung):
        await source.stop()


async def test_lost_rank_leaves_the_version_before_announced(
    group: SegmentGroup, tmp_path: Path
) -> None:
    """After the ranks have started again, segments of lost ones are no longer offered, and the next
    version has a higher number."""
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    await trainer.publisher.publish(group.snapshot(1, FIRST))
    lost = group.snapshot(2, SECOND)
    group.stop()
    group.lost = "rank 1 has ended with exit code -9"
    with pytest.raises(
        Unavailable, match="no rank serves a segment of the weights: rank 1 has ended"
    ):
        await trainer.publisher.publish(lost)
    assert announced(trainer.register).weight_version == 1
    again = SegmentGroup(tmp_path, 2)
    assert await trainer.publisher.publish(again.snapshot(2, SECOND)) == 3
    assert [one.weight_version for one in trainer.versions.published] == [3]
    again.stop()


async def test_ranks_write_one_file_together(
    group: SegmentGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shared directory and in shared memory, from which they then send."""
    directories = {"directory": tmp_path / "shared", "memory": tmp_path / "memory"}
    for one in directories.values():
        one.mkdir()
    monkeypatch.setattr(host_memory, "DIRECTORY", directories["memory"])

    place = host_memory.place()
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    trainer.change_worker("d0", **{MEMORY_KEY: place})
    copies = LocalCopies(workers=trainer.steering._workers, directory=str(directories["directory"]))
    publisher = Publisher(
        trainer.register, trainer.versions, source="host:1", floor=0, copies=copies
    )
    await publisher.publish(group.snapshot(1, FIRST))
    found = announced(trainer.register)
    assert found.ways == (DIRECTORY_WAY, place)
    manifest = WeightManifest.decode(trainer.versions.weights[1].manifest)
    for way, directory in directories.items():
        tensors = read_version(directory, found.manifest, manifest.tensors, mapped=way == "memory")
        assert data_of(tensors) == FIRST
    for server in group.servers:
        assert {type(memoryview(one.data).obj) for one in server._held[1].tensors} == {mmap}
    copies.keep(())
    assert not any(list(one.iterdir()) for one in directories.values())


async def test_group_receives_the_segments_of_all_ranks(
    group: SegmentGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file of rank 0's host; ranks that see other memory form no group."""
    monkeypatch.setattr(host_memory, "DIRECTORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    offered: dict[int, int] = {}
    groups = SimpleNamespace(way="group/gloo", offer=offered.__setitem__)
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    copies = LocalCopies(workers=trainer.steering._workers, directory="", groups=cast(Any, groups))
    publisher = Publisher(
        trainer.register, trainer.versions, source="host:1", floor=0, copies=copies
    )
    await publisher.publish(group.snapshot(1, FIRST))
    assert announced(trainer.register).ways == (host_memory.place(), "group/gloo")
    starts = starts_of([len(data) for data in FIRST.values()])
    sent = {
        name: os.pread(offered[1], len(data), start)
        for (name, data), start in zip(FIRST.items(), starts[:-1], strict=True)
    }
    assert sent == FIRST and os.fstat(offered[1]).st_size == starts[-1]
    os.close(offered[1])
    monkeypatch.setattr(copies, "_place", "another host")
    await publisher.publish(group.snapshot(2, SECOND))
    assert announced(trainer.register).ways == () and list(offered) == [1]
    copies.keep(())


async def test_rank_0_may_have_no_tensor(group: SegmentGroup, tmp_path: Path) -> None:
    """One tensor with most of the bytes belongs to the rank in the middle."""
    weights = {"large": bytes(1 << 20), "small": b"s"}
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    (tmp_path / "shared").mkdir()
    trainer.publisher._copies = LocalCopies(
        workers=trainer.steering._workers, directory=str(tmp_path / "shared")
    )
    async with publishing(trainer):
        await trainer.publisher.publish(group.snapshot(1, weights))
        found = announced(trainer.register)
        assert found.ways == (DIRECTORY_WAY,)
        assert [one.first for one in found.segments] == [0, 1]
        assert found.source not in {one.source for one in found.segments}
        subscriber = Worker(silence_s=60.0)
        subscriber._announcements.put_nowait(found.encode())
        assert await subscriber.until_serving(1) == weights
        await subscriber.stop()
    trainer.publisher._copies.keep(())


def data_of(tensors: list[NamedTensor]) -> dict[str, bytes]:
    return {one.name: bytes(one.data) for one in tensors}


async def test_held_version_is_written_by_all_ranks(group: SegmentGroup, tmp_path: Path) -> None:
    """Then rank 0 sends it from its file alone, after a restart too; without the directory on one
    rank nothing changes."""
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    for step, weights in enumerate((FIRST, SECOND), 1):
        await trainer.publisher.publish(group.snapshot(step, weights))
    await trainer.ask(RollBack(version=1, subject="me"))
    assert trainer.hold.base is not None and trainer.hold.base.segments == ()
    assert data_of(list(trainer.versions.weights[1].tensors)) == FIRST
    restarted = SteeredTrainer(trainer.register, tmp_path / "held", source="host:2")
    await restarted.ask(Promote(subject="me"))
    assert data_of(list(restarted.versions.weights[1].tensors)) == FIRST
    group.lost = "the ranks have ended"
    group.stop()
    with pytest.raises(Unavailable, match="the ranks have ended"):
        await trainer.ask(RollBack(version=2, subject="me"))
    assert trainer.hold.base is None


async def test_rank_that_cannot_write_is_named(group: SegmentGroup, tmp_path: Path) -> None:
    """It does not see the directory, for example."""
    await SteeredTrainer(FakeRegister(), tmp_path / "held").publisher.publish(
        group.snapshot(1, FIRST)
    )
    with pytest.raises(ResourceExhausted, match=r"rank 1: .*No such file"):
        await group.orders.write(1, tmp_path / "absent", aligned_bytes=1, mapped=False)


def test_port_in_use_ends_the_start(tmp_path: Path) -> None:
    """A rank takes the trainer's port plus its number on the host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = segment_config(tmp_path, port=port - 2)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            SegmentServer(None, config, rank=2)  # type: ignore[arg-type]
