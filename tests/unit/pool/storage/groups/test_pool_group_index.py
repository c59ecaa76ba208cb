"""Indexes and counters of groups: what a bounded scan reads, and that they always say what the
groups say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from forge.core.queue.groups import SAME_OUTCOME
from forge.v1 import common_pb2, pool_pb2
from services.pool import validation
from services.pool.data.commands import FreeGroups, MarkOrphans
from services.pool.maintenance.backup.backup import backup, check
from services.pool.maintenance.index_integrity import index_damage
from services.pool.maintenance.repair import copy_in, repair
from services.pool.service import begin_scan
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.environment.migrations import SCHEMA_VERSION, stored_version
from services.pool.storage.groups.group_index import INDEXES, counted_rollouts
from services.pool.storage.groups.indexed_groups import unindexed
from services.pool.storage.records import Records
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.damage import delete_record, flip_key, put_raw
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    append,
    change,
    commit,
    counted,
    pages,
    put_groups,
    seal,
    set_states,
)

TRAIN, EVAL = common_pb2.PURPOSE_TRAIN, common_pb2.PURPOSE_EVAL
PENDING = common_pb2.GROUP_STATE_PENDING
TRAINED = common_pb2.GROUP_STATE_TRAINED
TOMBSTONED = common_pb2.GROUP_STATE_TOMBSTONED
EVALUATED = common_pb2.GROUP_STATE_EVALUATED
MIB = 1 << 20


def quiet(done: int, of: int) -> None:
    """Takes no notice."""


def make_tagged(task_id: str, index: int, tag: str, **more: Any) -> common_pb2.GroupRecord:
    group = make_group(task_id, index, **more)
    group.task.tag = tag
    return group


def fill(store: PoolStore) -> None:
    """Groups in every state, some taken back, some freed, and trajectories without a group."""
    put_groups(store, *(make_group(f"t{number}", number) for number in range(12)))
    put_groups(store, *(make_tagged(f"e{n}", n, f"tag{n % 2}", purpose=EVAL) for n in range(3)))
    for number in range(10):
        for rollout in range(number % 3):
            rewards = [make_reward(value=float(number))]
            name = f"t{number}:{rollout}:0"
            seal(store, name, turns=0, rewards=rewards, now_unix_s=100.0 + number)
    for number in range(8):
        batch = f"batch-0-{number // 2}"
        trained = change(f"t{number}", TRAINED, batch_id=batch, step=number // 2 + 1)
        set_states(store, trained, now_unix_s=200.0 + number)
    set_states(store, change("t8", TOMBSTONED, reason=SAME_OUTCOME), now_unix_s=300.0)
    set_states(store, change("t9", TOMBSTONED, reason="rollout 0: died"), now_unix_s=301.0)
    set_states(store, change("e0", EVALUATED), now_unix_s=302.0)
    set_states(store, change("t6", PENDING), change("t7", PENDING), now_unix_s=303.0)
    seal(store, "t0:1:4", turns=0, now_unix_s=400.0)
    free = FreeGroups(task_ids=("t1",), covered_step=1, max_records=100, now_unix_s=500.0)
    commit(store, free)
    append(store, make_turn("orphan:0:0"))
    commit(store, MarkOrphans(task_ids=("orphan",), now_unix_s=501.0))


COUNTED = {
    (TRAIN, TRAINED, "code", ""): (6, 7),
    (TRAIN, TOMBSTONED, "code", SAME_OUTCOME): (1, 2),
    (TRAIN, TOMBSTONED, "code", ""): (1, 0),
    (EVAL, EVALUATED, "code", ""): (1, 0),
}


def damage_of(store: PoolStore) -> list[object]:
    found = store.read(lambda records: list(index_damage(records, readable=True)))
    return [each for each in found if each is not None]


def scan(store: PoolStore, **request: Any) -> tuple[pool_pb2.SettledGroups | None, list[str]]:
    """What a scan begins with, and the tasks that it returns."""
    begin, found = begin_scan(store, pool_pb2.ScanGroupsRequest(**request))
    settled = begin.settled if begin is not None and begin.HasField("settled") else None
    return settled, [one.group.task.task_id for one in pages(found)]


def test_counters_equal_a_recount(store: PoolStore) -> None:
    """Rewound groups do not count, late seals and freed groups do; a check agrees."""
    fill(store)
    settled, _ = scan(store, since="", settled_limit=1, count_settled=True)
    assert settled is not None
    assert counted(settled) == COUNTED
    assert (settled.next_train_index, settled.next_eval_index) == (12, 3)
    assert damage_of(store) == []


def test_recent_rollouts_are_those_sealed_last(store: PoolStore) -> None:
    """Of settled training groups, with their current rewards."""
    fill(store)
    settled, _ = scan(store, since="", settled_limit=1, count_settled=True)
    assert settled is not None
    (recent,) = settled.recent
    assert list(recent.sealed_unix_s) == [
        400.0,
        108.0,
        108.0,
        105.0,
        105.0,
        104.0,
        102.0,
        102.0,
        101.0,
    ]
    assert list(recent.outcomes) == [0.0, 8.0, 8.0, 5.0, 5.0, 4.0, 2.0, 2.0, 1.0]


def test_bounded_scan_returns_pending_and_newest_settled_groups(store: PoolStore) -> None:
    """For any number of earlier settled groups; a step is not cut."""
    fill(store)
    settled, found = scan(store, since="", settled_limit=1)
    assert settled is not None
    assert found == ["t6", "t7", "t10", "t11", "e1", "e2", "t4", "t5", "e0"]
    assert (settled.left_out_step, settled.left_out_unix_s) == (2, 301.0)
    assert not settled.counts
    everything, found = scan(store, since="", settled_limit=100)
    assert everything is not None
    assert len(found) == 15
    assert (everything.left_out_step, everything.left_out_unix_s) == (0, 0.0)


def test_changes_are_returned_with_counters_on_request(store: PoolStore) -> None:
    """Other scans have none."""
    fill(store)
    begin, _ = begin_scan(store, pool_pb2.ScanGroupsRequest(since="", settled_limit=1))
    set_states(store, change("t10", TRAINED, batch_id="batch-9-9", step=9))
    assert begin is not None
    settled, found = scan(store, since=begin.mark, settled_limit=1, count_settled=True)
    assert settled is not None
    assert found == ["t10"]
    assert counted(settled)[TRAIN, TRAINED, "code", ""] == (7, 7)
    assert not scan(store, since=begin.mark)[0]


def test_groups_of_a_tag_or_of_later_steps_are_found(store: PoolStore) -> None:
    """Without reading the others."""
    fill(store)
    assert scan(store, tag="tag0") == (None, ["e0", "e2"])
    assert scan(store, tag="other") == (None, [])
    assert scan(store, trained_after=1) == (None, ["t2", "t3", "t4", "t5"])
    assert scan(store, trained_after=3) == (None, [])


def test_groups_and_commits_are_found_by_id(store: PoolStore) -> None:
    """Without the task if it has a digest."""
    fill(store)
    digested = make_group("d", 99)
    digested.task_digest = b"digest"
    put_groups(store, digested)
    answer = store.look_up(
        pool_pb2.LookUpGroupsRequest(
            task_ids=["t1", "d", "orphan", "other"], batch_ids=["batch-0-0", "batch-0-3"]
        )
    )
    freed, known = answer.groups
    assert (freed.task.task_id, freed.state, freed.step) == ("t1", TRAINED, 1)
    assert freed.task.domain == "code"
    assert known.task == common_pb2.Task(task_id="d")
    assert known.task_digest == b"digest"
    assert [(one.batch_id, one.step) for one in answer.commits] == [("batch-0-0", 1)]
    assert answer.answered == 6


def test_look_up_is_cut_to_a_message(store: PoolStore) -> None:
    """It says how many ids it answers; more ids than the bound are refused."""
    put_groups(store, *(make_group(f"b{n}", n, payload_json="x" * MIB) for n in range(3)))
    request = pool_pb2.LookUpGroupsRequest(task_ids=["b0", "b1", "b2"], batch_ids=["batch"])
    answer = store.look_up(request)
    assert ([one.task.task_id for one in answer.groups], answer.answered) == (["b0"], 1)
    with pytest.raises(InvalidArgument, match="10001 ids"):
        ids = map(str, range(validation.MAX_LOOKED_UP + 1))
        validation.check_look_up(pool_pb2.LookUpGroupsRequest(task_ids=ids))


def as_version_3(records: Records) -> None:
    """Takes out of a shard what version 3 did not have."""
    for table in (*INDEXES, Table.SETTLED_COUNTS):
        records.clear(table)
    records.put(Table.META, b"schema_version", b"3")


def test_shard_of_version_3_opens_with_its_groups_counted(
    open_store: Callable[..., PoolStore], tmp_path: Path
) -> None:
    """Once, from the groups; later changes are added."""
    store = open_store(shard="s0")
    fill(store)
    before = scan(store, since="", settled_limit=1, count_settled=True)
    store.close()
    old = Environment(tmp_path / "shard", map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4)
    old.write(as_version_3)
    old.close()
    store = open_store()
    assert store.read(stored_version) == SCHEMA_VERSION
    assert damage_of(store) == []
    assert scan(store, since="", settled_limit=1, count_settled=True) == before
    set_states(store, change("t10", TRAINED, batch_id="batch-9-9", step=9))
    assert damage_of(store) == []


def counter_keys(store: PoolStore) -> list[bytes]:
    return store.read(
        lambda records: [k for k, _ in records.scan_checksummed(Table.SETTLED_COUNTS)]
    )


def test_damaged_counter_blocks_no_commit(
    open_store: Callable[..., PoolStore], tmp_path: Path
) -> None:
    """A scan returns every group instead, and the next commit counts again."""
    store = open_store(shard="s0")
    fill(store)
    keys = counter_keys(store)
    store.close()
    for key in keys:
        put_raw(tmp_path / "shard", Table.SETTLED_COUNTS, key, b"not intact")
    store = open_store()
    settled, found = scan(store, since="", settled_limit=1, count_settled=True)
    assert settled is None
    assert len(found) == 15
    set_states(store, change("t10", TRAINED, batch_id="batch-9-9", step=9))
    assert damage_of(store) == []
    assert scan(store, since="", settled_limit=1, count_settled=True)[0] is not None


@pytest.mark.parametrize("table", INDEXES)
@pytest.mark.parametrize("how", [delete_record, flip_key])
def test_damaged_index_loses_no_group(
    open_store: Callable[..., PoolStore], tmp_path: Path, table: Table, how: Callable[..., object]
) -> None:
    """A check names it, a scan has the pending groups all the same, and a repair rebuilds it."""
    store = open_store(shard="s0")
    fill(store)
    pending = scan(store, since="", settled_limit=1)[1][:6]
    (key, *_) = store.read(lambda records: [k for k, _ in records.scan_checksummed(table)])
    store.close()
    backup(tmp_path / "shard", tmp_path / "copy", quiet)
    how(tmp_path / "shard", table, key)
    assert table in {one.table for one in check(tmp_path / "shard", quiet)}
    store = open_store()
    assert set(pending) <= set(scan(store, since="", settled_limit=1)[1])
    assert {"t2", "t3", "t4", "t5"} <= set(scan(store, trained_after=1)[1])
    store.close()
    assert repair(tmp_path / "shard", copy_in(tmp_path / "copy"), quiet) == []
    assert damage_of(open_store()) == []


def test_wrong_counter_is_named(open_store: Callable[..., PoolStore], tmp_path: Path) -> None:
    """Also a lost counter: a check counts again."""
    store = open_store(shard="s0")
    fill(store)
    keys = counter_keys(store)
    store.close()
    for key in keys:
        delete_record(tmp_path / "shard", Table.SETTLED_COUNTS, key)
    told = [str(one) for one in check(tmp_path / "shard", quiet)]
    assert any("counted 0, but there are 6" in one for one in told)
    assert any("commit batch-0-0 1: counted 0, but there are 2" in one for one in told)


def test_lowest_sealed_attempt_counts(store: PoolStore) -> None:
    """One attempt of each rollout, and none beyond the size of the group."""
    put_groups(store, make_group("t", 0))
    for name in ("t:0:1", "t:0:3", "t:1:2", "t:2:0"):
        seal(store, name, turns=0, now_unix_s=float(name[-1]))
    rollouts = store.read(lambda records: counted_rollouts(records, make_group("t", 0)))
    assert [rollout.sealed_unix_s for rollout in rollouts] == [1.0, 2.0]
    assert store.read(unindexed) == []
