"""The life of one instance of a replicated shard, beyond what its leader and its link tell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from forge.core.errors import StaleFence
from forge.v1 import replica_pb2 as pb
from services.pool.config import PoolConfig
from services.pool.readers import ReaderThreads
from services.pool.replication.follower import Following
from services.pool.replication.replica import Replica
from tests.support.pool.replicas import LINEAGE, Node
from tests.support.pool.store import Writer


async def no_work() -> None:
    """A leader without retention."""


@dataclass
class Etcd:
    """An etcd by whose record one replica is in sync, and where whoever campaigns is elected."""

    in_sync: str = "another"
    fence: int = 2
    written: bool = False
    resigned: bool = False

    async def get(self, key: str) -> Any:
        if key.startswith("pool/shards/"):
            return None  # Nobody has served the shard yet.
        record = {"lineage": LINEAGE, "in_sync": [self.in_sync], "fence": 1}
        return SimpleNamespace(value=json.dumps(record).encode(), mod_revision=1)

    async def campaign(self, name: str, instance_id: str, *, ttl_s: float) -> Etcd:
        return self

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        self.written = True
        raise StaleFence("not to be led")

    async def raise_above(self, floor: int) -> None:
        assert self.fence > floor

    async def resign(self) -> None:
        self.resigned = True


@dataclass
class Process:
    """What a replica knows of its process."""

    coordinator: Etcd
    config: PoolConfig = field(default_factory=PoolConfig)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    ready: bool = True

    def remote(self, kind: str, stub: object) -> None:
        return None

    async def until_listening(self) -> str:
        return "host:1"

    def stop(self) -> None:
        self.stopped.set()


@dataclass
class BusyWriter:
    """Answers nobody."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


async def wait(self: Following) -> None:
    """In place of `Following.run`."""
    await asyncio.Event().wait()


async def live(node: Node, etcd: Etcd) -> None:
    """A replica, until its process is to end."""
    process: Any = Process(etcd)
    readers = ReaderThreads(1)
    replica = Replica(process, node.store, Writer(node.store), readers, on_lead=no_work)
    await replica.start()
    async with asyncio.timeout(60):
        await process.stopped.wait()
    await replica.stop()
    await readers.close()


async def test_defect_of_the_follower_ends_its_process(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would neither follow nor lead; its next process follows."""

    async def crash(self: Following) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Following, "run", crash)
    await live(node("a"), Etcd())


async def test_replica_that_began_a_copy_does_not_lead(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The election may have cut it short; no record is written, and another replica may lead."""
    replica = node("a")
    replica.lead()

    async def follow(self: Following) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            # What was on its way to the writer when the election was told.
            replica.take(pb.FollowStep(begin=pb.FollowBegin(lineage=LINEAGE, from_scratch=True)))

    monkeypatch.setattr(Following, "run", follow)
    etcd = Etcd(in_sync=replica.state().replica_id)
    await live(replica, etcd)
    assert replica.state().copying
    assert etcd.resigned
    assert not etcd.written


async def test_elected_replica_that_stops_resigns_at_once(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it stores its last steps as a follower: the other replica need not wait for the
    TTL."""
    monkeypatch.setattr(Following, "run", wait)
    one = node("a")
    one.lead()
    etcd = Etcd(in_sync=one.state().replica_id)
    process: Any = Process(etcd)
    readers, writer = ReaderThreads(1), BusyWriter()
    replica = Replica(process, one.store, writer, readers, on_lead=no_work)
    await replica.start()
    async with asyncio.timeout(60):
        await writer.asked.wait()
    await replica.stop()
    await readers.close()
    assert etcd.resigned
