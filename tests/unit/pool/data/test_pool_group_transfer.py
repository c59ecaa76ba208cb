"""Moves of groups from one shard to another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import DataLoss, FailedPrecondition, StaleFence, Unavailable
from forge.core.trajectory import TaskId
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import EraseTasks, FreeGroups
from services.pool.data.reads.group_scan import Scan
from services.pool.data.reads.query import query
from services.pool.group_mover import GroupMover
from services.pool.service import begin_scan
from services.pool.storage.keys import group_key
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    append,
    change,
    commit,
    damage_of,
    fetch,
    pages,
    put_groups,
    reward,
    seal,
    set_states,
    summary,
)
from tests.support.pool.sweeper import Direct
from tests.support.scheduler.standby import AtOnce

TRAINED = common_pb2.GROUP_STATE_TRAINED
PENDING = common_pb2.GROUP_STATE_PENDING


class Pair:
    """Two shards of a pool; the second one imports from the first."""

    def __init__(self, folder: Path) -> None:
        self.source = PoolStore(folder / "source", shard="s0")
        self.target = PoolStore(folder / "target", shard="s1")
        pools: Any = self
        self.at_source = GroupMover(self.source, Direct(self.source), AtOnce(), pools)
        self.at_target = GroupMover(self.target, Direct(self.target), AtOnce(), pools)
        self.meanwhile: Callable[[], None] = lambda: None
        """Called after each response of an export."""

    async def pick(self, **_: Any) -> tuple[None, Pair]:
        return None, self

    async def ExportGroups(
        self, request: pool_pb2.ExportGroupsRequest
    ) -> AsyncIterator[pool_pb2.ExportGroupsResponse]:
        async for response in self.at_source.export(request):
            yield response
            self.meanwhile()

    async def copy(self, *task_ids: str, fence: int = 1) -> list[pool_pb2.GroupDigest]:
        request = pool_pb2.ImportGroupsRequest(source_shard="s0", task_ids=task_ids, fence=fence)
        return list((await self.at_target.import_groups(request)).groups)

    async def mark(self, digests: list[pool_pb2.GroupDigest], *, fence: int = 1) -> list[str]:
        request = pool_pb2.MarkGroupsMovedRequest(groups=digests, target_shard="s1", fence=fence)
        return list((await self.at_source.mark(request)).moved)

    async def move(self, *task_ids: str) -> list[str]:
        return await self.mark(await self.copy(*task_ids))

    def damage(self) -> list[str]:
        return [
            f"{shard}: {found}"
            for shard, store in (("s0", self.source), ("s1", self.target))
            for found in damage_of(store)
        ]

    def close(self) -> None:
        self.source.close()
        self.target.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def fill(store: PoolStore, task_id: str = "task", index: int = 0) -> None:
    """A trained group of two rollouts, one of them with a late reward, and an abandoned attempt."""
    put_groups(store, make_group(task_id, index))
    for rollout in (0, 1):
        name = f"{task_id}:{rollout}:0"
        append(store, make_turn(name), make_turn(name, 1))
        seal(store, name, turns=2, rewards=[make_reward(value=0.5)])
    reward(store, make_reward("late", 0.25), trajectory_id=f"{task_id}:0:0")
    append(store, make_turn(f"{task_id}:1:1"))
    seal(
        store,
        f"{task_id}:1:1",
        state=common_pb2.TRAJECTORY_STATE_ABANDONED,
        reason="died",
    )
    set_states(store, change(task_id, TRAINED, step=3, batch_id="b0"))


def scanned(store: PoolStore, **request: Any) -> list[pool_pb2.ScanGroupsResponse]:
    _, scan = begin_scan(store, pool_pb2.ScanGroupsRequest(**request))
    found: Scan = scan
    return pages(found)


def counts(store: PoolStore) -> pool_pb2.SettledGroups:
    begin, _ = begin_scan(
        store, pool_pb2.ScanGroupsRequest(since="", settled_limit=1, count_settled=True)
    )
    assert begin is not None
    return begin.settled


def queried(store: PoolStore, **wanted: Any) -> list[str]:
    request = pool_pb2.QueryTrajectoriesRequest(filter=pool_pb2.TrajectoryFilter(**wanted))
    found = store.read(lambda records: query(records, request, shard=store.shard))
    return sorted(each.trajectory_id for each in found.trajectories)


async def test_moved_group_is_equal_on_the_other_shard(pair: Pair) -> None:
    """Trajectories, rewards, place, state, counters and the change log; both shards are intact, and
    the source has nothing of it in scans, counts and queries."""
    fill(pair.source)
    put_groups(pair.source, make_group("other", 1))
    (before, other) = scanned(pair.source)
    trajectories = [fetch(pair.source, f"task:{r}:0") for r in (0, 1)]
    counted, found = counts(pair.source), queried(pair.source)
    assert await pair.move("task") == ["task"]
    (after,) = scanned(pair.target)
    before.group.pool_shard = "s1"
    assert after == before
    assert [fetch(pair.target, f"task:{r}:0") for r in (0, 1)] == trajectories
    counted.next_train_index = 1
    assert counts(pair.target) == counted
    assert queried(pair.target) == queried(pair.target, closed_from_unix_s=50.0) == found
    assert scanned(pair.source) == [other]
    assert not counts(pair.source).counts and not queried(pair.source)
    assert (pair.source.stats().groups, pair.target.stats().groups) == (1, 1)
    assert not pair.damage()


async def test_pending_groups_move_with_their_records(pair: Pair) -> None:
    """One without attempts, with its payload, and one with a sealed and an open trajectory."""
    put_groups(pair.source, make_group("fresh", 0, payload_json='{"n": 1}'))
    put_groups(pair.source, make_group("begun", 1))
    append(pair.source, make_turn("begun:0:0"), make_turn("begun:1:0"))
    seal(pair.source, "begun:0:0")
    assert await pair.move("fresh", "begun") == ["fresh", "begun"]
    fresh, begun = scanned(pair.target)
    assert fresh.group.task.payload_json == '{"n": 1}'
    assert [each.turns for each in begun.trajectories] == [1, 1]
    append(pair.target, make_turn("begun:1:0", 1))
    seal(pair.target, "begun:1:0", turns=2)
    assert not pair.damage()


async def test_each_step_of_a_move_can_be_repeated(pair: Pair) -> None:
    """A copy is replaced until the mark; afterwards an import and a mark change nothing."""
    fill(pair.source)
    await pair.copy("task")
    digests = await pair.copy("task")
    assert await pair.mark(digests) == ["task"]
    append(pair.source, make_turn("stray:0:0"))
    found = scanned(pair.target)
    assert await pair.copy("task") == []
    assert await pair.mark([pool_pb2.GroupDigest(task_id="task")]) == ["task"]
    assert scanned(pair.target) == found
    assert not pair.damage()


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda store: reward(store, make_reward("late", 0.25)),
        lambda store: set_states(store, change("task", PENDING)),
        lambda store: append(store, make_turn("task:1:5")),
        lambda store: commit(
            store, EraseTasks(task_ids=("task",), max_records=99, now_unix_s=200.0)
        ),
    ],
    ids=["reward", "rewind", "attempt", "erasure"],
)
async def test_a_group_that_changed_since_its_copy_is_not_marked(
    pair: Pair, meanwhile: Callable[[PoolStore], None]
) -> None:
    """The source stays authoritative; the next copy has the change, and replaces the first."""
    put_groups(pair.source, make_group())
    append(pair.source, make_turn())
    seal(pair.source, rewards=[make_reward()])
    set_states(pair.source, change("task", TRAINED, step=1, batch_id="b0"))
    digests = await pair.copy("task")
    meanwhile(pair.source)
    assert await pair.mark(digests) == []
    (now,) = scanned(pair.source)
    assert await pair.move("task") == ["task"]
    (after,) = scanned(pair.target)
    now.group.pool_shard = "s1"
    assert after == now
    assert not pair.damage()


async def test_a_change_during_the_copy_is_found(pair: Pair) -> None:
    """A reward after the first page of an export is in no copy, so the mark refuses it."""
    put_groups(pair.source, make_group())
    append(pair.source, make_turn())
    seal(pair.source)
    late = [make_reward("late", 0.25)]

    def reward_late() -> None:
        while late:
            reward(pair.source, late.pop())

    pair.meanwhile = reward_late
    digests = await pair.copy("task")
    assert await pair.mark(digests) == []
    assert await pair.move("task") == ["task"]
    assert [each.event_id for each in fetch(pair.target).rewards] == ["late"]


async def test_freed_and_erased_groups_stay_freed_and_erased(pair: Pair) -> None:
    """The target neither has their content nor takes it."""
    for index, task_id in enumerate(("freed", "erased")):
        fill(pair.source, task_id, index)
    free = FreeGroups(task_ids=("freed",), covered_step=9, max_records=999, now_unix_s=300.0)
    commit(pair.source, free)
    commit(pair.source, EraseTasks(task_ids=("erased",), max_records=99, now_unix_s=300.0))
    await pair.move("freed", "erased")
    assert summary(pair.target, "freed:0:0").freed
    for task_id in ("freed", "erased"):
        with pytest.raises(Exception, match="freed"):
            append(pair.target, make_turn(f"{task_id}:0:7"))
    assert not pair.target.settled(after=b"", limit=9)
    assert not pair.damage()


async def test_writes_to_a_moved_group_are_refused(pair: Pair) -> None:
    """Turns, rewards and seals for good, as no repetition can succeed here; states are repeated by
    the leader, which knows the other shard. It is looked up and fetched as before."""
    fill(pair.source)
    await pair.move("task")
    for write in (
        lambda: append(pair.source, make_turn("task:0:9")),
        lambda: reward(pair.source, make_reward("later")),
        lambda: seal(pair.source, turns=2),
    ):
        with pytest.raises(FailedPrecondition, match="task moved to pool shard s1"):
            write()
    with pytest.raises(Unavailable, match="task moved to pool shard s1"):
        set_states(pair.source, change("task", PENDING))
    found = pair.source.look_up(pool_pb2.LookUpGroupsRequest(task_ids=["task"]))
    assert [group.task.task_id for group in found.groups] == ["task"]
    assert fetch(pair.source).turns
    (moved,) = pages(pair.source.scan_tasks([TaskId("task")]))
    assert moved.group.state == common_pb2.GROUP_STATE_MOVED
    commit(pair.source, EraseTasks(task_ids=("task",), max_records=99, now_unix_s=300.0))
    assert not scanned(pair.source) and not pair.damage()


async def test_a_deposed_leader_moves_nothing(pair: Pair) -> None:
    """Its imports and marks are refused by the fence of the next one."""
    fill(pair.source)
    digests = await pair.copy("task", fence=2)
    with pytest.raises(StaleFence):
        await pair.copy("task", fence=1)
    set_states(pair.source, fence=3)
    with pytest.raises(StaleFence):
        await pair.mark(digests, fence=2)
    assert scanned(pair.source)


async def test_a_group_can_move_back(pair: Pair) -> None:
    """After a cancelled retirement the other shard may retire."""
    fill(pair.source)
    before = scanned(pair.source)
    await pair.move("task")
    pair.at_source, pair.at_target = pair.at_target, pair.at_source
    digests = (
        await pair.at_target.import_groups(
            pool_pb2.ImportGroupsRequest(source_shard="s1", task_ids=["task"], fence=1)
        )
    ).groups
    back = pool_pb2.MarkGroupsMovedRequest(groups=digests, target_shard="s0", fence=1)
    assert (await pair.at_source.mark(back)).moved == ["task"]
    assert scanned(pair.source) == before and not scanned(pair.target)
    assert (pair.source.stats().groups, pair.target.stats().groups) == (1, 0)
    assert not pair.damage()


async def test_damaged_group_does_not_move(pair: Pair) -> None:
    """The import names it, and stores nothing of it; those before it are copied."""
    fill(pair.source, "whole", 0)
    fill(pair.source, "broken", 1)
    key = group_key("broken")
    pair.source.write(lambda records: records.put_checksummed(Table.GROUPS, key, b"flipped"))
    with pytest.raises(DataLoss, match="broken"):
        await pair.copy("whole", "broken")
    assert [each.group.task.task_id for each in scanned(pair.target)] == ["whole"]
