"""A follower's side of its leader's stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from forge.core.errors import ResourceExhausted
from forge.runtime.coordination import Instance
from forge.runtime.rpc.chunks import split
from forge.runtime.rpc.remote import Remote
from forge.v1 import replica_pb2 as pb
from services.pool.readers import ReaderThreads
from services.pool.replication.follower import Following
from tests.support.pool.replicas import LINEAGE, SHARD, Node
from tests.support.pool.store import commit


@dataclass
class Stream:
    """A call that sends one step, and then nothing more."""

    responses: list[pb.FollowResponse]
    written: list[pb.FollowRequest]

    async def write(self, request: pb.FollowRequest) -> None:
        self.written.append(request)

    async def read(self) -> pb.FollowResponse:
        if not self.responses:
            await asyncio.Event().wait()
        return self.responses.pop(0)

    def cancel(self) -> None:
        return None


@dataclass
class LeaderStub(Remote[Any]):
    """The leader of the shard, wherever it is looked for."""

    written: list[pb.FollowRequest] = field(default_factory=list)

    async def pick(self, **_: Any) -> tuple[Instance, Any]:
        leader = Instance(
            kind="pool", instance_id="a", address="host:1", metadata={"shard": SHARD}, revision=1
        )
        return leader, self

    def Follow(self) -> Stream:
        step = pb.FollowStep(begin=pb.FollowBegin(lineage=LINEAGE, from_scratch=True))
        chunks = split(step.SerializeToString())
        return Stream([pb.FollowResponse(step=chunk) for chunk in chunks], self.written)


@dataclass
class FullDisk:
    """A writer whose disk takes nothing a few times, and then all."""

    node: Node
    refusals: int
    stored: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise ResourceExhausted("no space left on device")
        answer = commit(self.node.store, message)
        self.stored.set()
        return answer


async def own_address() -> str:
    return "host:1"


async def followed(replica: Node, writer: FullDisk, leader: LeaderStub) -> None:
    """The leader's stub, until something of it is stored."""
    readers = ReaderThreads(1)
    following = Following(
        replica.store, writer, readers, leader, instance_id="b", own_address=own_address
    )
    running = asyncio.create_task(following.run())
    async with asyncio.timeout(60):
        await writer.stored.wait()
    running.cancel()
    await asyncio.wait({running})
    await readers.close()


async def test_follower_without_room_reports_it_to_the_leader(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once when it returns, and as long as it lasts: callers must see a full disk, not an absent
    follower."""
    monkeypatch.setattr("services.pool.replication.follower.RETRY_S", 0.0)
    monkeypatch.setattr("services.pool.replication.follower.REFUSED_S", 0.0)
    replica, leader = node("b"), LeaderStub()
    writer = FullDisk(replica, refusals=2)
    await followed(replica, writer, leader)
    told = [request.state.no_room for request in leader.written]
    assert told == ["", "no space left on device", "no space left on device"]


async def test_follower_reports_its_last_leader(node: Callable[[str], Node]) -> None:
    """A leader that was frozen while this replica led must know it before it sends its commits."""
    replica, leader = node("b"), LeaderStub()
    replica.lead(term=7)
    replica.lead(term=8)
    writer = FullDisk(replica, refusals=0)
    await followed(replica, writer, leader)
    assert [request.state.newest_term for request in leader.written] == [8]
