"""Writes to a pool whose content follows from their names, and the account of what it acknowledged.

Owns no process: whoever kills one asks the account afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import grpc
import grpc.aio

from forge.core.errors import ForgeError
from forge.runtime.coordination import Instance
from forge.runtime.rpc.chunks import split
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from tests.support.pool_process import PoolClient
from tests.support.pool_records import make_group, make_reward, make_turn

TURNS = 3
"""Of each trajectory."""
_RECENT, _OLDER = 60, 20
_FETCHED = 10
"""Trajectories in memory at a time."""
_CALL_S = 10.0
_RETRY_FOR_S = 300.0
_RETRY_S = 0.1
_PASSING = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
)


class Ledger:
    """What the pool has acknowledged, in any of its lives."""

    def __init__(self) -> None:
        self.turns: set[tuple[str, int]] = set()
        self.sealed: dict[str, common_pb2.TrajectorySummary] = {}
        self.groups: set[str] = set()
        self.count = 0
        self._news = asyncio.Event()

    def add(self) -> None:
        self.count += 1
        self._news.set()

    async def reach(self, count: int) -> None:
        while self.count < count:
            self._news.clear()
            await self._news.wait()

    def trajectories(self) -> list[str]:
        """In the order in which they were begun."""
        names = {trajectory_id for trajectory_id, _ in self.turns} | set(self.sealed)
        return sorted(names, key=lambda name: int(name[1:].partition(":")[0]))

    def sample(self, draw: random.Random) -> list[str]:
        """Those begun last, and some of the others."""
        names = self.trajectories()
        older = names[:-_RECENT]
        return names[-_RECENT:] + draw.sample(older, min(_OLDER, len(older)))


def turn_of(trajectory_id: str, index: int) -> common_pb2.Turn:
    """The one turn there can be under this name: its content is drawn from it."""
    draw = random.Random(f"{trajectory_id}/{index}")
    # Some need pages of their own, a few need several chunks.
    size = draw.choice([10, 10, 1_000, 1_000, 20_000, 400_000])
    return make_turn(
        trajectory_id, index, prompt=[draw.randrange(1 << 31)] * size, sampled=range(index + 1)
    )


def requests_of(turns: Iterable[common_pb2.Turn]) -> Iterator[pool_pb2.AppendTurnsRequest]:
    """Each turn under its own number."""
    for turn in turns:
        for chunk in split(turn.SerializeToString()):
            yield pool_pb2.AppendTurnsRequest(sequence=turn.turn_index, turn=chunk)


async def audit(client: PoolClient, ledger: Ledger, names: list[str] | None = None) -> None:
    """Every acknowledged group is there; every acknowledged turn and seal, or those of `names`, is
    there and equal, and nothing is half there."""
    # What is acknowledged while we look need not be in what we see.
    groups, turns, seals = set(ledger.groups), set(ledger.turns), dict(ledger.sealed)
    listed = {response.group.task.task_id: response for response in await client.groups()}
    assert groups <= set(listed)
    expected: dict[str, set[int]] = {}
    for name, index in turns:
        expected.setdefault(name, set()).add(index)
    names = ledger.trajectories() if names is None else names
    async for trajectory in _each(client, names):
        stored = {turn.turn_index: turn for turn in trajectory.turns}
        for index, turn in stored.items():
            assert turn == turn_of(trajectory.trajectory_id, index)
        assert expected.get(trajectory.trajectory_id, set()) <= set(stored)
        sealed = seals.get(trajectory.trajectory_id)
        if sealed is not None:
            assert trajectory.state == common_pb2.TRAJECTORY_STATE_SEALED
            assert len(stored) == TURNS
            assert sealed in listed[trajectory.task_id].trajectories


async def _each(client: PoolClient, names: list[str]) -> AsyncIterator[common_pb2.Trajectory]:
    for begin in range(0, len(names), _FETCHED):
        for trajectory in await client.fetch(*names[begin : begin + _FETCHED]):
            yield trajectory


class Writer:
    """Writes to one shard as the services do: found in the directory, sent again until told."""

    def __init__(
        self, pools: Remote[pool_pb2_grpc.PoolServiceStub], shard: str, ledger: Ledger
    ) -> None:
        self._pools = pools
        self._where: Callable[[Instance], bool] = lambda one: one.metadata.get("shard") == shard
        self._ledger = ledger

    async def fill(self, names: Iterator[str]) -> None:
        """Groups with a sealed trajectory each, one after the other, until cancelled."""
        for task_id in names:
            group = make_group(task_id, int(task_id.removeprefix("t")))
            await self._call("PutGroups", pool_pb2.PutGroupsRequest(groups=[group], fence=1))
            self._ledger.groups.add(task_id)
            self._ledger.add()
            await self.finish(f"{task_id}:0:0")

    async def finish(self, trajectory_id: str) -> None:
        """Appends what is not acknowledged, and seals."""
        while missing := [
            turn_of(trajectory_id, index)
            for index in range(TURNS)
            if (trajectory_id, index) not in self._ledger.turns
        ]:
            try:
                await self._append(missing)
            except ForgeError as error:
                assert error.retryable, error
                # grpc may tell of a cancelled task as of a cancelled call.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from error
            await asyncio.sleep(_RETRY_S)
        seal = pool_pb2.SealTrajectoryRequest(
            trajectory_id=trajectory_id,
            domain="code",
            turns=TURNS,
            rewards=[make_reward()],
            state=common_pb2.TRAJECTORY_STATE_SEALED,
        )
        self._ledger.sealed[trajectory_id] = (await self._call("SealTrajectory", seal)).summary
        self._ledger.add()

    async def _append(self, turns: list[common_pb2.Turn]) -> None:
        async def requests() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
            for request in requests_of(turns):
                yield request

        _, stub = await self._pools.pick(where=self._where, timeout_s=_CALL_S)
        async with translated():
            async for answer in stub.AppendTurns(requests(), timeout=_CALL_S):
                if answer.status_code == 0:
                    self._ledger.turns.add((turns[0].trajectory_id, answer.sequence))
                    self._ledger.add()
                else:
                    assert answer.status_code in _PASSING, answer.error

    async def _call(self, method: str, request: object) -> pool_pb2.SealTrajectoryResponse:
        answer: pool_pb2.SealTrajectoryResponse = await self._pools.call(
            method, request, timeout_s=_CALL_S, retry_for_s=_RETRY_FOR_S, where=self._where
        )
        return answer
