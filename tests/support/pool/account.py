"""Records whose content follows from their names, and the account of what a pool acknowledged.

Owns what is written and what must be found; `load` and the tests write it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

from forge.runtime.rpc.chunks import split
from forge.v1 import common_pb2, pool_pb2
from tests.support.pool.process import PoolClient
from tests.support.pool.records import make_group, make_reward, make_turn

TURNS = 3
"""Of each trajectory."""
OUTCOME, LATE = "outcome", "late"
"""Event ids of the reward that comes with the seal, and of the one after it."""
_RECENT, _OLDER = 60, 20
_FETCHED = 10
"""Trajectories in memory at a time."""


class Ledger:
    """What the pool has acknowledged, in any of its lives."""

    def __init__(self) -> None:
        self.turns: set[tuple[str, int]] = set()
        self.sealed: dict[str, common_pb2.TrajectorySummary] = {}
        self.rewarded: set[str] = set()
        """Trajectories with their late reward."""
        self.groups: set[str] = set()
        self.trained: set[str] = set()
        """Groups with their last state."""
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

    def unfinished(self) -> list[str]:
        """Groups of which not everything is acknowledged."""
        return sorted(one for one in self.groups if trajectory_of(one) not in self.rewarded)

    def sample(self, draw: random.Random) -> list[str]:
        """Those begun last, and some of the others."""
        names = self.trajectories()
        older = names[:-_RECENT]
        return names[-_RECENT:] + draw.sample(older, min(_OLDER, len(older)))

    def __str__(self) -> str:
        return (
            f"{len(self.turns)} turns, {len(self.sealed)} seals, {len(self.rewarded)} late "
            f"rewards, {len(self.groups)} groups and {len(self.trained)} trained ones"
        )


def trajectory_of(task_id: str) -> str:
    """The only one of its group."""
    return f"{task_id}:0:0"


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


def reward_of(trajectory_id: str, event_id: str) -> common_pb2.RewardEvent:
    return make_reward(event_id, random.Random(f"{trajectory_id}/{event_id}").uniform(-1.0, 1.0))


def seal_of(trajectory_id: str) -> pool_pb2.SealTrajectoryRequest:
    return pool_pb2.SealTrajectoryRequest(
        trajectory_id=trajectory_id,
        domain="code",
        turns=TURNS,
        rewards=[reward_of(trajectory_id, OUTCOME)],
        state=common_pb2.TRAJECTORY_STATE_SEALED,
    )


def late_reward_of(trajectory_id: str) -> pool_pb2.AppendRewardsRequest:
    return pool_pb2.AppendRewardsRequest(
        trajectory_id=trajectory_id, rewards=[reward_of(trajectory_id, LATE)]
    )


def group_of(task_id: str) -> common_pb2.GroupRecord:
    return make_group(task_id, int(task_id.removeprefix("t")))


def put_of(task_id: str, fence: int) -> pool_pb2.PutGroupsRequest:
    return pool_pb2.PutGroupsRequest(groups=[group_of(task_id)], fence=fence)


def trained_of(task_id: str) -> common_pb2.GroupRecord:
    """The group in its last state."""
    draw = random.Random(f"{task_id}/trained")
    group = group_of(task_id)
    group.state = common_pb2.GROUP_STATE_TRAINED
    group.step = draw.randrange(1, 1 << 40)
    group.batch_id = f"b{draw.randrange(1 << 40)}"
    return group


def train_of(task_id: str, fence: int) -> pool_pb2.SetGroupStatesRequest:
    group = trained_of(task_id)
    change = pool_pb2.SetGroupStatesRequest.Change(
        task_id=task_id, state=group.state, step=group.step, batch_id=group.batch_id
    )
    return pool_pb2.SetGroupStatesRequest(changes=[change], fence=fence)


async def audit(client: PoolClient, ledger: Ledger, names: list[str] | None = None) -> None:
    """Every acknowledged group is there, in the state acknowledged; every acknowledged turn, seal
    and reward, or those of `names`, is there and equal, and nothing is half there."""
    # What is acknowledged while we look need not be in what we see.
    groups, trained = set(ledger.groups), set(ledger.trained)
    account = _Account.of(ledger)
    names = ledger.trajectories() if names is None else names
    listed = {response.group.task.task_id: response for response in await client.groups()}
    assert groups <= set(listed)
    for task_id, response in listed.items():
        _check_group(response.group, trained=task_id in trained)
    async for trajectory in _each(client, names):
        account.check(trajectory, listed[trajectory.task_id].trajectories)


def _check_group(stored: common_pb2.GroupRecord, *, trained: bool) -> None:
    task_id = stored.task.task_id
    assert bool(stored.settled_unix_s) == (stored.state == common_pb2.GROUP_STATE_TRAINED)
    # The shard's own: its name, and when it was trained.
    stored.ClearField("settled_unix_s")
    stored.ClearField("pool_shard")
    assert stored == trained_of(task_id) or (stored == group_of(task_id) and not trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    """What was acknowledged of trajectories at one moment."""

    turns: dict[str, set[int]]
    sealed: dict[str, common_pb2.TrajectorySummary]
    rewarded: set[str]

    @classmethod
    def of(cls, ledger: Ledger) -> _Account:
        turns: dict[str, set[int]] = {}
        for name, index in ledger.turns:
            turns.setdefault(name, set()).add(index)
        return cls(turns=turns, sealed=dict(ledger.sealed), rewarded=set(ledger.rewarded))

    def check(
        self,
        stored: common_pb2.Trajectory,
        summaries: Iterable[common_pb2.TrajectorySummary],
    ) -> None:
        """`summaries` are those of its group."""
        name = stored.trajectory_id
        for turn in stored.turns:
            assert turn == turn_of(name, turn.turn_index)
        assert self.turns.get(name, set()) <= {turn.turn_index for turn in stored.turns}
        for event in stored.rewards:
            assert event == reward_of(name, event.event_id)
        events = {event.event_id for event in stored.rewards}
        assert LATE in events or name not in self.rewarded
        if stored.state == common_pb2.TRAJECTORY_STATE_SEALED:
            assert len(stored.turns) == TURNS
            assert OUTCOME in events
        if name in self.sealed:
            # A seal sent again tells of the late reward too, where that had been stored.
            assert _without_late(self.sealed[name]) in map(_without_late, summaries)


def _without_late(summary: common_pb2.TrajectorySummary) -> common_pb2.TrajectorySummary:
    early = [event for event in summary.rewards if event.event_id != LATE]
    del summary.rewards[:]
    summary.rewards.extend(early)
    return summary


async def _each(client: PoolClient, names: list[str]) -> AsyncIterator[common_pb2.Trajectory]:
    for begin in range(0, len(names), _FETCHED):
        for trajectory in await client.fetch(*names[begin : begin + _FETCHED]):
            yield trajectory
