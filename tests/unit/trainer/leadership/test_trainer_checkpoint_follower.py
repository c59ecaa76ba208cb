"""A standby's copy of a checkpoint counts once it is stored, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forge.v1 import trainer_pb2 as pb
from services.trainer.actors.checkpointing import CheckpointWriter, Prune
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.store import (
    CheckpointStore,
    checkpoints_in,
    read_checkpoint,
)
from services.trainer.leadership.checkpoint_follower import CheckpointFollower, CheckpointSource
from services.trainer.leadership.lineage import LineageRecord
from tests.support.runtime.waiting import settle, until


class Leader:
    """A trainer in discovery with one checkpoint, whose last response can be held back."""

    def __init__(self, directory: Path) -> None:
        store = CheckpointStore(directory)
        path = store.save(
            lambda folder: None,
            step=1,
            weight_version=1,
            history=CheckpointHistory([pb.StepMetrics(step=1)]),
        )
        saved = read_checkpoint(path)
        self.record = LineageRecord(
            lineage=saved.lineage, fence=1, step=1, fingerprint=saved.fingerprint
        )
        self.source = CheckpointSource(directory)
        self.all_sent = asyncio.Event()
        self.delivered = asyncio.Event()
        self.delivered.set()
        self.instances = [SimpleNamespace(address="leader:1")]

    async def known(self) -> None:
        """Discovery has answered."""

    def discover(self, kind: str) -> Leader:
        return self

    async def follow(self, key: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(value=msgspec.json.encode(self.record))
        await asyncio.Event().wait()

    def stub(self, make: Any, address: str) -> Leader:
        return self

    def FetchCheckpoint(self, request: pb.FetchCheckpointRequest) -> _Call:
        return _Call(self._responses(request))

    async def _responses(
        self, request: pb.FetchCheckpointRequest
    ) -> AsyncIterator[pb.FetchCheckpointResponse]:
        async for response in self.source.send(request):
            yield response
        if not request.stored:
            self.all_sent.set()
            await self.delivered.wait()


class _Call:
    def __init__(self, responses: AsyncIterator[pb.FetchCheckpointResponse]) -> None:
        self._responses = responses

    def __aiter__(self) -> AsyncIterator[pb.FetchCheckpointResponse]:
        return self._responses

    def cancel(self) -> None:
        """Nothing is on the way."""


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    return Leader(tmp_path / "leader")


def follower_of(leader: Leader, directory: Path) -> CheckpointFollower:
    context: Any = SimpleNamespace(
        coordinator=leader, channels=leader, metadata={"incarnation": "standby"}
    )
    return CheckpointFollower(context, directory, CheckpointRetention())


async def test_leader_waits_until_a_checkpoint_is_stored(leader: Leader, tmp_path: Path) -> None:
    """Not only until it is sent: a standby that is elected before has it in no directory."""
    leader.delivered.clear()
    following = asyncio.create_task(follower_of(leader, tmp_path / "standby").follow())
    await leader.all_sent.wait()
    handed_over = asyncio.create_task(leader.source.handed_over(1, standbys=1))
    await settle()
    assert not handed_over.done()
    leader.delivered.set()
    await handed_over
    assert list((tmp_path / "standby").glob("step-*"))
    following.cancel()


async def test_leader_waits_for_a_standby_that_had_the_checkpoint_before(
    leader: Leader, tmp_path: Path
) -> None:
    """It was restarted, and has asked for nothing: it must get the next checkpoint."""
    following = asyncio.create_task(follower_of(leader, tmp_path / "leader").follow())

    async def waits() -> bool:
        handed_over = asyncio.create_task(leader.source.handed_over(2, standbys=1))
        await settle()
        return handed_over.cancel()

    await until(waits)
    await leader.source.handed_over(1, standbys=1)
    following.cancel()


async def test_checkpoint_that_arrives_during_an_election_is_stored(
    leader: Leader, tmp_path: Path
) -> None:
    """The winner waits for it."""
    leader.delivered.clear()
    follower = follower_of(leader, tmp_path / "standby")
    following = asyncio.create_task(follower.follow())
    await leader.all_sent.wait()
    arrived = asyncio.create_task(follower.arrived())
    await settle()
    assert not arrived.done()
    leader.delivered.set()
    await arrived
    following.cancel()
    assert list((tmp_path / "standby").glob("step-*"))


async def test_checkpoint_that_is_fetched_is_not_removed(tmp_path: Path) -> None:
    """Nor the one that the record names; both are once they are neither."""
    directory = tmp_path / "leader"
    source, store = (
        CheckpointSource(directory),
        CheckpointStore(directory, CheckpointRetention(last=1)),
    )
    writer = CheckpointWriter(store, source.sending)
    for step in (1, 2, 3):
        store.save(lambda folder: None, step=step, weight_version=1, history=CheckpointHistory())
    async with aclosing(source.send(pb.FetchCheckpointRequest(step=1, trainer="s"))) as responses:
        await anext(responses)
        assert writer.receive(Prune(recorded=2)) == 2
        assert [path.name[-1] for path in checkpoints_in(directory)] == ["1", "2", "3"]
    assert writer.receive(Prune(recorded=3)) == 3
    assert [path.name[-1] for path in checkpoints_in(directory)] == ["3"]
