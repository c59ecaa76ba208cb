"""Retention: freed groups, their remaining records, and late writes to them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from forge.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from forge.core.queue.admission import QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import FREED
from forge.core.tasks.task_digest import task_digest
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from services.pool import retention
from services.pool.data.commands import FreeGroups, MarkOrphans, SetGroupStates
from services.pool.data.removal.freed_groups import Freed
from services.pool.maintenance.backup import backup
from services.pool.storage.groups.settled_counts import group_counts
from services.pool.storage.keys import group_key, trajectory_key
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from services.scheduler.state.messages.groups import FindNew
from services.scheduler.state.queries.queue_status import status_of
from services.scheduler.state.stored_group import stored_group
from services.scheduler.state.term_state import TermState
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    ABANDONED,
    append,
    change,
    commit,
    fetch,
    groups_page,
    put_groups,
    reward,
    seal,
    set_states,
    summary,
)
from tests.support.pool.sweeper import MAX_AGE_S, SETTLED_S, records_of
from tests.support.runtime.waiting import until

TRAINED = common_pb2.GROUP_STATE_TRAINED
TOMBSTONED = common_pb2.GROUP_STATE_TOMBSTONED
EVALUATED = common_pb2.GROUP_STATE_EVALUATED
PENDING = common_pb2.GROUP_STATE_PENDING


def add_group(store: PoolStore, task_id: str = "task", index: int = 0, *, turns: int = 2) -> None:
    """A group with one sealed trajectory and one attempt that was never closed."""
    group = make_group(task_id, index, payload_json='{"question": "' + "x" * 500 + '"}')
    group.task_digest = b"digest"
    put_groups(store, group)
    append(store, *(make_turn(f"{task_id}:0:0", i, prefix=5 * i) for i in range(turns)))
    append(store, make_turn(f"{task_id}:1:0"))
    seal(store, f"{task_id}:0:0", turns=turns, rewards=[make_reward(value=1.5), make_reward("b")])


def train(store: PoolStore, task_id: str = "task", *, step: int = 1) -> None:
    set_states(store, change(task_id, TRAINED, batch_id="batch-0-0", step=step))


def free_now(store: PoolStore, *task_ids: str, step: int = 1, max_records: int = 512) -> Freed:
    found: Freed = commit(
        store,
        FreeGroups(
            task_ids=task_ids, covered_step=step, max_records=max_records, now_unix_s=SETTLED_S
        ),
    )
    return found


async def test_trained_group_is_freed_once_covered_and_old(store, sweeper):
    """Neither a checkpoint alone nor age alone frees it."""
    add_group(store)
    train(store, step=7)
    sweeper.covered_step = 7
    assert await sweeper.sweep() == Freed()
    sweeper.covered_step, sweeper.now_unix_s = 6, SETTLED_S + MAX_AGE_S
    assert await sweeper.sweep() == Freed()
    sweeper.covered_step = 7
    freed = await sweeper.sweep()
    assert (freed.groups, freed.records) == (1, 5)
    counts = records_of(store)
    assert (counts[Table.TURNS], counts[Table.REWARDS], counts[Table.SETTLED]) == (0, 0, 0)
    assert await sweeper.sweep() == Freed()


async def test_set_clock_frees_no_uncovered_group(store, sweeper):
    """Age follows the wall clock; a group without a covering checkpoint is kept at any time."""
    for number, name in enumerate(("covered", "uncovered")):
        add_group(store, name, number)
        train(store, name, step=1 + number)
    sweeper.covered_step, sweeper.now_unix_s = 1, SETTLED_S - 100 * MAX_AGE_S
    retention = sweeper.retention()
    assert await retention.sweep() == Freed()
    sweeper.now_unix_s = SETTLED_S + 100 * MAX_AGE_S
    assert (await retention.sweep()).groups == 1
    assert await retention.sweep() == Freed()
    sweeper.covered_step = 2
    assert (await retention.sweep()).groups == 1


async def test_freed_group_keeps_its_counts(store, sweeper):
    """A listing of a freed group is as before: state, step, place, and each trajectory with its
    counts and the sum of its outcomes; only the task's payload is deleted."""
    add_group(store)
    train(store, step=7)
    (before,) = groups_page(store).groups
    sweeper.covered_step, sweeper.now_unix_s = 7, SETTLED_S + MAX_AGE_S
    await sweeper.sweep()
    (after,) = groups_page(store).groups
    assert after.group.freed_unix_s == sweeper.now_unix_s
    assert after.group.task.payload_json == ""
    after.group.freed_unix_s = 0
    after.group.task.payload_json = before.group.task.payload_json
    assert after.group == before.group
    sealed, left_open = after.trajectories
    assert sealed.freed and left_open.freed
    assert [(one.kind, one.value) for one in sealed.rewards] == [
        (common_pb2.REWARD_KIND_OUTCOME, 1.5)
    ]
    counted = before.trajectories[0]
    assert (sealed.turns, sealed.sampled_tokens) == (counted.turns, counted.sampled_tokens)
    assert sealed.sealed_unix_s == counted.sealed_unix_s
    assert left_open.state == ABANDONED


async def test_run_that_starts_over_tombstones_freed_groups(store, sweeper):
    """They cannot be trained again. Other groups are pending; a repetition changes nothing, and
    without the switch a freed group refuses."""
    for index, name in enumerate(("gone", "kept")):
        add_group(store, name, index)
        train(store, name)
    free_now(store, "gone")
    pending = {
        name: common_pb2.GroupRecord(state=common_pb2.GROUP_STATE_PENDING)
        for name in ("gone", "kept")
    }
    rewind = SetGroupStates(states=pending, fence=1, now_unix_s=SETTLED_S)
    with pytest.raises(FailedPrecondition, match="gone was freed after it was trained"):
        commit(store, rewind)
    for _ in range(2):
        assert commit(store, replace(rewind, tombstone_freed=True)) == ["gone"]
    gone, kept = (response.group for response in groups_page(store).groups)
    assert (gone.state, gone.reason, gone.step) == (TOMBSTONED, FREED, 0)
    assert kept.state == common_pb2.GROUP_STATE_PENDING
    counts = store.read(lambda records: list(group_counts(records)))
    assert [(row.state, row.groups) for row in counts if row.groups] == [(TOMBSTONED, 1)]
    sweeper.now_unix_s = SETTLED_S + MAX_AGE_S
    assert await sweeper.sweep() == Freed()
    store.close()
    assert list(backup.check(store.directory, lambda done, of: None)) == []


def test_half_freed_group_is_freed_to_its_end_after_a_start_over(store):
    """Its tombstone does not hide the records that are left."""
    add_group(store)
    train(store)
    assert free_now(store, "task", max_records=1).unfinished
    pending = {"task": common_pb2.GroupRecord(state=PENDING)}
    rewind = SetGroupStates(states=pending, fence=1, tombstone_freed=True, now_unix_s=SETTLED_S)
    for _ in range(2):
        assert commit(store, rewind) == ["task"]
    assert free_now(store, "task").groups == 1
    counts = records_of(store)
    assert (counts[Table.TURNS], counts[Table.REWARDS], counts[Table.SETTLED]) == (0, 0, 0)


def test_freed_orphan_gets_no_state_by_a_start_over(store):
    """Its group was never here: the answer says so, and nothing is stored."""
    commit(store, MarkOrphans(task_ids=("task",), now_unix_s=SETTLED_S))
    assert free_now(store, "task").groups == 1
    before = records_of(store)
    pending = {"task": common_pb2.GroupRecord(state=PENDING)}
    with pytest.raises(NotFound, match="group task is not on this shard"):
        commit(store, SetGroupStates(states=pending, fence=1, tombstone_freed=True, now_unix_s=0.0))
    assert records_of(store) == before


@pytest.mark.parametrize("state", [TOMBSTONED, EVALUATED])
async def test_tombstoned_and_evaluated_groups_need_no_checkpoint(store, sweeper, state):
    """Age alone frees them."""
    add_group(store)
    set_states(store, change("task", state, reason="given up"))
    assert (await sweeper.sweep()).groups == 0
    sweeper.now_unix_s = SETTLED_S + MAX_AGE_S
    assert (await sweeper.sweep()).groups == 1


async def test_pending_groups_are_never_freed(store, sweeper):
    """At any age, and for any need of room."""
    add_group(store)
    set_states(store, change("task", PENDING))
    sweeper.covered_step, sweeper.now_unix_s = 10**6, SETTLED_S + 10**9
    assert await sweeper.sweep(keep_age_s=0, keep_bytes=1) == Freed()
    assert len(fetch(store).turns) == 2


async def test_rewind_finds_every_uncovered_group(store, sweeper):
    """Steps after the oldest checkpoint can be made visible again with all their data; a covered
    step cannot, and the answer says so and changes nothing."""
    for step in (1, 2, 3):
        add_group(store, f"t{step}", step)
        train(store, f"t{step}", step=step)
    sweeper.covered_step = 1
    await sweeper.sweep(keep_age_s=0, keep_bytes=1)
    set_states(store, change("t2", PENDING), change("t3", PENDING))
    assert len(fetch(store, "t2:0:0").turns) == 2
    train(store, "t2", step=2)
    with pytest.raises(FailedPrecondition, match=r"t1 was freed .* step 1, which a checkpoint"):
        set_states(store, change("t2", PENDING), change("t1", PENDING))
    states = {one.group.task.task_id: one.group.state for one in groups_page(store).groups}
    assert (states["t1"], states["t2"]) == (TRAINED, TRAINED)


async def test_rewind_between_choice_and_freeing_keeps_the_group(store, sweeper):
    """The transaction that frees checks again."""
    add_group(store)
    train(store)
    sweeper.covered_step = 1
    sweeper.writer.before = lambda: set_states(store, change("task", PENDING))
    assert (await sweeper.sweep(keep_age_s=0)).groups == 0
    assert len(fetch(store).turns) == 2


async def test_shard_beyond_its_size_frees_the_longest_settled_first(store, sweeper):
    """Age does not count until the records fit `keep_bytes` again."""
    for index in range(40):
        task_id = f"t{index:02}"
        put_groups(store, make_group(task_id, index))
        append(store, make_turn(f"{task_id}:0:0", messages_json="x" * 50_000))
        seal(store, f"{task_id}:0:0")
        change_ = change(task_id, TRAINED, batch_id="b", step=1)
        set_states(store, change_, now_unix_s=SETTLED_S + index)
    sweeper.covered_step = 1
    limit_bytes = store.environment.live_bytes // 2
    await sweeper.sweep(keep_bytes=limit_bytes)
    assert store.environment.live_bytes <= limit_bytes
    freed = [bool(one.group.freed_unix_s) for one in groups_page(store).groups]
    assert freed == sorted(freed, reverse=True)
    assert 0 < sum(freed) < 40


async def test_large_group_is_freed_in_small_transactions(store, sweeper, monkeypatch):
    """None deletes more than its share; after a restart the freeing continues, and a half-freed
    group is neither returned nor extended."""
    monkeypatch.setattr(retention, "MAX_RECORDS", 10)
    add_group(store, turns=35)
    train(store)
    first = free_now(store, "task", max_records=10)
    assert first.unfinished and first.groups == 0
    with pytest.raises(NotFound, match="was freed"):
        fetch(store)
    # The one that is still there is not told from those that are gone.
    for index in (0, 34, 99):
        with pytest.raises(FailedPrecondition, match="was freed"):
            append(store, make_turn("task:0:0", index))
    sweeper.covered_step = 0
    await sweeper.sweep(keep_age_s=0)
    sweeper.covered_step = 1
    await sweeper.sweep(keep_age_s=0)
    assert max(freed.records for freed in sweeper.writer.freed) == 10
    assert records_of(store)[Table.TURNS] == 0
    assert sum(freed.groups for freed in sweeper.writer.freed) == 1


async def test_failed_sweep_is_followed_by_others(store, sweeper, monkeypatch):
    """For lack of room or a defect."""
    monkeypatch.setattr(retention, "PERIOD_S", 0)
    add_group(store)
    set_states(store, change("task", TOMBSTONED))
    failures = [ValueError("a defect"), ResourceExhausted("no room")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    sweeper.writer.before = fail
    running = asyncio.create_task(sweeper.retention(keep_age_s=0).run())
    await until(lambda: sweeper.writer.freed)
    running.cancel()
    assert summary(store).freed


@pytest.mark.parametrize("table", [Table.TRAJECTORIES, Table.GROUPS])
def test_damaged_group_blocks_no_freeing(store, table):
    """A group marked as freed is deleted and a deleted group is marked, for any damaged record."""
    for task_id in ("damaged", "whole"):
        add_group(store, task_id)
        set_states(store, change(task_id, TOMBSTONED))
    last_key = {
        Table.TRAJECTORIES: trajectory_key(parse_trajectory_id("damaged:1:0")),
        Table.GROUPS: group_key("damaged"),
    }[table]
    store.write(lambda records: records.put_checksummed(table, last_key, b"no checksum"))
    for freed_groups in (1, 0):
        assert free_now(store, "damaged", "whole").groups == freed_groups
        assert summary(store, "whole:0:0").freed
        freed = summary(store, "damaged:0:0").freed
        assert freed == (table is Table.GROUPS)
        if not freed:
            assert len(fetch(store, "damaged:0:0").turns) == 2


def test_late_writes_to_a_freed_group_are_refused(store):
    """Turns, rewards and new attempts are refused with the reason; a repeated seal or commit is
    acknowledged again, others are not."""
    add_group(store)
    train(store, step=3)
    before = summary(store)
    free_now(store, "task", step=3)
    counts = records_of(store)
    for late in (make_turn("task:0:0", 0), make_turn("task:0:0", 2), make_turn("task:1:0", 1)):
        with pytest.raises(FailedPrecondition, match="was freed: a checkpoint covers step 3"):
            append(store, late)
    with pytest.raises(FailedPrecondition, match="task:0:1 cannot begin"):
        append(store, make_turn("task:0:1"))
    with pytest.raises(FailedPrecondition, match="was freed"):
        reward(store, make_reward("late"))
    with pytest.raises(FailedPrecondition, match="was freed"):
        reward(store, make_reward("late"), trajectory_id="task:5:0")
    again = seal(store, turns=2, rewards=[make_reward(value=1.5), make_reward("late")])
    assert (again.state, again.turns, again.freed) == (before.state, before.turns, True)
    with pytest.raises(FailedPrecondition, match="was freed"):
        seal(store, turns=3)
    with pytest.raises(FailedPrecondition, match="was freed"):
        seal(store, "task:1:0", turns=1)
    train(store, step=3)
    with pytest.raises(FailedPrecondition, match="was freed after it was trained"):
        set_states(store, change("task", TRAINED, batch_id="another", step=4))
    put_groups(store, make_group("task"))
    with pytest.raises(NotFound, match="task:0:0 was freed: only its summary is left"):
        fetch(store)
    assert records_of(store) == counts


def test_new_leader_counts_freed_groups_as_before(store):
    """accepted = trained + tombstoned + pending, the order of the queue, rewards by domain and
    known tasks equal those before groups were freed."""
    for index, task_id in enumerate(("a", "b", "c", "d")):
        add_group(store, task_id, index)
        record = groups_page(store).groups[index].group
        record.task_digest = task_digest(record.task)
        store.write(
            lambda records, record=record: records.put(
                Table.GROUPS, record.task.task_id.encode(), record.SerializeToString()
            )
        )
    tasks = {one.group.task.task_id: one.group.task for one in groups_page(store).groups}
    train(store, "a", step=1)
    train(store, "b", step=2)
    set_states(store, change("c", TOMBSTONED, reason="hung"))
    before = scheduler_of(store)
    assert free_now(store, "a", "b", "c", "d", step=1).groups == 2
    after = scheduler_of(store)
    assert status_of(after, now_s=0.0) == status_of(before, now_s=0.0)
    totals = after.queue.ledger.totals()
    assert (totals.accepted, totals.trained, totals.tombstoned, totals.pending) == (4, 2, 1, 1)
    assert after.find_new(FindNew(tasks=tasks)) == []
    tasks["a"].payload_json = "{}"
    with pytest.raises(InvalidArgument, match="'a' was submitted before with different"):
        after.find_new(FindNew(tasks=tasks))


def scheduler_of(store: PoolStore) -> TermState:
    """What a new leader of the schedulers reads from the shard."""
    state = TermState(GenerationQueue(QueueSettings(concurrency=8), term=1), max_pending=100)
    state.earlier.restore(map(stored_group, groups_page(store).groups), now_s=0.0)
    return state


def test_group_without_a_digest_keeps_its_payload(store):
    """A repeated submission is recognized by it."""
    put_groups(store, make_group("old", payload_json='{"a": 1}'))
    set_states(store, change("old", TOMBSTONED))
    assert free_now(store, "old").groups == 1
    assert groups_page(store).groups[0].group.task.payload_json == '{"a": 1}'


def test_repeated_state_keeps_its_first_time(store):
    """A repeated commit does not make a group younger."""
    add_group(store)
    train(store)
    set_states(
        store, change("task", TRAINED, batch_id="batch-0-0", step=1), now_unix_s=SETTLED_S + 50
    )
    (entry,) = store.settled(after=b"", limit=10)
    assert (entry.settled_unix_s, entry.step) == (SETTLED_S, 1)
