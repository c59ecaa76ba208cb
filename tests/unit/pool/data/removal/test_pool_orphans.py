"""Trajectories whose group never came: found, given up and freed by age."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import FailedPrecondition, NotFound
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from services.pool import retention
from services.pool.actors.writer import Writer
from services.pool.data.commands import AppendTurns, MarkOrphans, SetGroupStates
from services.pool.maintenance.backup.backup import check
from services.pool.storage.keys import trajectory_key
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from services.pool.validation import new_turn
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    append,
    change,
    commit,
    fetch,
    groups_page,
    put_groups,
    queued,
    seal,
    set_states,
    summary,
)
from tests.support.pool.sweeper import MAX_AGE_S, SETTLED_S, Sweeper, records_of


def add_orphan(store: PoolStore, task_id: str = "lost") -> None:
    """A sealed trajectory and an open one, of a task that nobody submitted here."""
    append(store, make_turn(f"{task_id}:0:0"), make_turn(f"{task_id}:1:0"))
    seal(store, f"{task_id}:0:0", rewards=[make_reward(value=0.5)])


async def test_old_orphans_are_freed(store: PoolStore, sweeper: Sweeper) -> None:
    """Age counts from the mark; counts, states and the sum of outcomes stay."""
    add_orphan(store)
    sweeper.now_unix_s = SETTLED_S
    assert (await sweeper.sweep()).groups == 0
    sweeper.now_unix_s = SETTLED_S + MAX_AGE_S - 1
    assert (await sweeper.sweep()).groups == 0
    sweeper.now_unix_s = SETTLED_S + MAX_AGE_S
    freed = await sweeper.sweep()
    assert (freed.groups, freed.records) == (1, 3)
    counts = records_of(store)
    assert (counts[Table.TURNS], counts[Table.REWARDS], counts[Table.SETTLED]) == (0, 0, 0)
    found = summary(store, "lost:0:0")
    assert found.freed
    assert [event.value for event in found.rewards] == [0.5]
    assert summary(store, "lost:1:0").state == common_pb2.TRAJECTORY_STATE_ABANDONED
    with pytest.raises(FailedPrecondition, match="its group never came"):
        append(store, make_turn("lost:2:0"))
    assert (await sweeper.sweep()).groups == 0


async def test_orphans_are_not_freed_early_for_room(store: PoolStore, sweeper: Sweeper) -> None:
    """A running gateway may still write them, without a scheduler."""
    add_orphan(store)
    await sweeper.sweep(keep_bytes=1)
    assert (await sweeper.sweep(keep_bytes=1)).groups == 0
    assert len(fetch(store, "lost:0:0").turns) == 1


async def test_late_group_adopts_its_orphans(store: PoolStore, sweeper: Sweeper) -> None:
    """The mark and its age are deleted: the group is pending like others, and counted once."""
    add_orphan(store)
    await sweeper.sweep()
    put_groups(store, make_group("lost"))
    sweeper.now_unix_s = SETTLED_S + 10 * MAX_AGE_S
    assert (await sweeper.sweep()).groups == 0
    assert queued(store) == ["lost"]
    (listed,) = groups_page(store).groups
    assert listed.group.state == common_pb2.GROUP_STATE_PENDING
    assert len(listed.trajectories) == 2


async def test_orphan_freed_before_its_group_keeps_its_outcome(
    store: PoolStore, sweeper: Sweeper
) -> None:
    """If it is freed again with its group, it is not counted from deleted rewards."""
    add_orphan(store)
    await sweeper.sweep()
    sweeper.now_unix_s = SETTLED_S + MAX_AGE_S
    await sweeper.sweep()
    put_groups(store, make_group("lost"))
    append(store, make_turn("lost:0:1"))
    set_states(store, change("lost", common_pb2.GROUP_STATE_TOMBSTONED))
    assert (await sweeper.sweep()).groups == 1
    assert [event.value for event in summary(store, "lost:0:0").rewards] == [0.5]
    assert summary(store, "lost:0:1").freed


async def test_orphan_search_reads_page_by_page(
    store: PoolStore, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step reads more than a page, all orphans are found, and no group is."""
    monkeypatch.setattr(retention, "LOOKED_AT", 3)
    for number in range(5):
        add_orphan(store, f"lost{number}")
    put_groups(store, make_group("kept"))
    append(store, make_turn("kept:0:0"))
    found: list[Any] = []
    after = b""
    while True:
        page = store.orphans(after=after, limit=3)
        found += page.task_ids
        if not (after := page.last_key):
            break
    assert sorted(set(found)) == [f"lost{number}" for number in range(5)]


def test_orphan_search_continues_behind_damage(store: PoolStore) -> None:
    """A damaged header or state hides no other orphan."""
    put_groups(store, make_group("kept"))
    append(store, make_turn("kept:0:0"))
    add_orphan(store)
    key = trajectory_key(parse_trajectory_id("kept:0:0"))
    store.write(lambda records: records.put_checksummed(Table.TRAJECTORIES, key, b"no checksum"))
    store.write(lambda records: records.put_checksummed(Table.STATES, b"kept", b"no checksum"))
    assert store.orphans(after=b"", limit=10).task_ids == ("lost",)


def test_orphan_mark_is_no_damage(tmp_path: Path) -> None:
    """`forge pool check` recognizes a state without a group."""
    store = PoolStore(tmp_path / "shard", shard="s0")
    add_orphan(store)
    commit(store, MarkOrphans(task_ids=("lost",), now_unix_s=SETTLED_S))
    store.close()
    assert list(check(tmp_path / "shard", lambda done, of: None)) == []


def test_orphan_mark_is_no_group(store: PoolStore) -> None:
    """It is in no queue, no state can be set on it, and a second mark changes nothing."""
    add_orphan(store)
    command = MarkOrphans(task_ids=("lost", "unknown"), now_unix_s=SETTLED_S)
    assert commit(store, command) == 2
    assert commit(store, command) == 0
    assert queued(store) == []
    state = common_pb2.GroupRecord(state=common_pb2.GROUP_STATE_TRAINED, step=1)
    with pytest.raises(NotFound):
        commit(store, SetGroupStates(states={"lost": state}, fence=1, now_unix_s=SETTLED_S))


def refusals(kind: str, code: str) -> float:
    found = REGISTRY.get_sample_value("forge_pool_refusals_total", {"kind": kind, "code": code})
    return found or 0.0


def test_refusals_are_counted_by_reason(store: PoolStore) -> None:
    """Turns one by one, and unknown groups; accepted ones are not counted."""
    writer = Writer(store)
    add_orphan(store, "t")
    before = refusals("AppendTurns", "FAILED_PRECONDITION"), refusals("SetGroupStates", "NOT_FOUND")
    turns = tuple(
        new_turn(make_turn(name, index).SerializeToString())
        for name, index in (("t:0:0", 1), ("t:0:0", 2), ("t:1:0", 1))
    )
    state = common_pb2.GroupRecord(state=common_pb2.GROUP_STATE_PENDING)
    unknown = SetGroupStates(states={"nobody": state}, fence=1, now_unix_s=SETTLED_S)
    answers = writer.receive_batch([AppendTurns(turns=turns), unknown])
    assert [answer is None for answer in answers[0]] == [False, False, True]
    after = refusals("AppendTurns", "FAILED_PRECONDITION"), refusals("SetGroupStates", "NOT_FOUND")
    assert (after[0] - before[0], after[1] - before[1]) == (2, 1)
