"""Scans that return only the changes since an earlier scan."""

from __future__ import annotations

from typing import Any

from forge.v1 import common_pb2, pool_pb2, replica_pb2
from services.pool.data.commands import EraseTasks, FreeGroups
from services.pool.data.reads import group_scan
from services.pool.readers import ReaderThreads
from services.pool.storage.change_trackers import RecentChanges
from services.pool.storage.records import checksummed_value
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.servicer import make_servicer
from tests.support.pool.store import append, change, commit, put_groups, reward, seal, set_states

TRAINED = common_pb2.GROUP_STATE_TRAINED


def changed(store: PoolStore, mark: str) -> list[str] | None:
    task_ids = store.changed_since(mark).task_ids
    return None if task_ids is None else sorted(task_ids)


def mark_of(store: PoolStore) -> str:
    return store.changed_since("").mark


def test_every_group_whose_scan_result_changed_is_returned(store):
    """A group, its state, its trajectories, their rewards and its freeing; each once, and no group
    without a change."""
    put_groups(store, make_group("a"), make_group("b", 1), make_group("c", 2))
    mark = mark_of(store)
    assert changed(store, mark) == []
    put_groups(store, make_group("d", 3))
    append(store, make_turn("a:0:0"))
    assert changed(store, mark) == ["a", "d"]
    mark = mark_of(store)
    append(store, make_turn("a:0:0", 1))
    put_groups(store, make_group("b", 1), fence=7)
    assert changed(store, mark) == []
    seal(store, "a:0:0", turns=2)
    set_states(store, change("b", TRAINED, batch_id="x", step=1), fence=7)
    assert changed(store, mark) == ["a", "b"]
    mark = mark_of(store)
    reward(store, make_reward("late"), trajectory_id="a:0:0")
    commit(store, FreeGroups(task_ids=("b",), covered_step=1, max_records=9, now_unix_s=1.0))
    assert changed(store, mark) == ["a", "b"]


def test_mark_of_another_process_is_unknown(store, open_store):
    """Also an invented mark. The record is in memory: a reopened shard returns everything, once."""
    put_groups(store, make_group("a"))
    mark = mark_of(store)
    again = open_store(shard="s0")
    process = mark_of(again).partition(":")[0]
    for unknown in (mark, "", "nonsense", f"{process}:", f"{process}:x", f"{process}:9"):
        assert changed(again, unknown) is None
    assert changed(again, mark_of(again)) == []


def test_mark_older_than_the_record_is_unknown():
    """The record is bounded: the oldest changes are forgotten first, and with them the marks
    before."""
    recent = RecentChanges(most_tasks=2)
    marks = []
    for task in "abcd":
        marks.append(recent.since("").mark)
        recent.record_changed(Table.GROUPS, task.encode(), None, replicated=True)
        recent.committed()
    assert [recent.since(mark).task_ids for mark in marks] == [None, None, ["d", "c"], ["d"]]
    recent.record_changed(Table.STATES, b"c", None, replicated=True)
    recent.committed()
    assert recent.since(marks[2]).task_ids == ["c", "d"]


def test_changes_of_a_running_commit_are_returned_again():
    """A scan may have read them or not: its mark is of the commit before."""
    recent = RecentChanges()
    recent.record_changed(Table.STATES, b"a", None, replicated=True)
    during = recent.since("").mark
    recent.committed()
    assert recent.since(during).task_ids == ["a"]
    assert recent.since(recent.since("").mark).task_ids == []


def test_failed_commit_hides_no_later_commit():
    """Its changes are in no mark, and are returned with those of the next."""
    recent = RecentChanges()
    recent.record_changed(Table.STATES, b"a", None, replicated=True)
    after = recent.since("").mark
    recent.record_changed(Table.STATES, b"b", None, replicated=True)
    recent.committed()
    assert recent.since(after).task_ids == ["b", "a"]


def test_changes_of_a_follower_are_recorded(node):
    """A follower that leads later knows its own changes; a whole copy ends every mark before it."""
    follower = node("b")
    mark = mark_of(follower.store)
    record = replica_pb2.RecordKey(table=Table.STATES.value, key=b"a")
    value = checksummed_value(b"a", b"")
    commit_step = replica_pb2.FollowStep(commit=replica_pb2.RecordChanges(position=2))
    commit_step.commit.changes.add(record=record, value=value)
    follower.take(replica_pb2.FollowStep(caught_up_position=1), commit_step)
    assert changed(follower.store, mark) == ["a"]
    copy = replica_pb2.FollowStep()
    copy.begin.from_scratch = True
    follower.take(copy)
    assert changed(follower.store, mark) is None
    assert changed(follower.store, mark_of(follower.store)) == []


async def scan(store: PoolStore, **request: Any) -> list[pool_pb2.ScanGroupsResponse]:
    readers = ReaderThreads(1)
    servicer = make_servicer(store, readers=readers)
    try:
        asked = pool_pb2.ScanGroupsRequest(**request)
        return [response async for response in servicer.ScanGroups(asked, None)]
    finally:
        await readers.close()


async def test_scan_by_mark_begins_with_the_next_mark(store):
    """Settled groups come without payload, open ones without counted turns."""
    over, running = make_group("over", payload_json='{"q": 1}'), make_group("open", 1)
    for group in (over, running):
        group.MergeFrom(common_pb2.GroupRecord(task_digest=b"d"))
    put_groups(store, over, running)
    set_states(store, change("over", TRAINED, batch_id="x", step=1))
    append(store, make_turn("open:0:0"))
    begin, first, second = await scan(store, since="")
    assert begin.begin.mark
    assert not begin.begin.changes_only
    assert not begin.HasField("group")
    assert (first.group.task.task_id, first.group.task.payload_json) == ("over", "")
    assert second.group.task.payload_json == "{}"
    assert (second.trajectories[0].turns, second.trajectories[0].sampled_tokens) == (0, 0)
    (plain, _) = await scan(store)
    assert plain.group.task.payload_json == '{"q": 1}'
    assert not plain.HasField("begin")

    begin, *told = await scan(store, since=begin.begin.mark)
    assert begin.begin.changes_only
    assert told == []
    seal(store, "open:0:0")
    (begin, only) = await scan(store, since=begin.begin.mark)
    assert only.group.task.task_id == "open"


async def test_erasures_are_scanned_by_mark(store, monkeypatch):
    """Those since the mark, page by page, or all if the mark is unknown; each with id, state and
    reason alone."""
    monkeypatch.setattr(group_scan, "PAGE_GROUPS", 2)
    put_groups(store, *(make_group(name, index) for index, name in enumerate("abcdef")))
    set_states(store, change("a", TRAINED, batch_id="x", step=1))
    commit(store, EraseTasks(task_ids=("a", "b", "gone"), max_records=99, now_unix_s=1.0))
    (begin,) = await scan(store, since=mark_of(store), erased_only=True)
    assert begin.begin.changes_only
    commit(store, EraseTasks(task_ids=("c", "e"), max_records=99, now_unix_s=2.0))
    set_states(store, change("d", TRAINED, batch_id="x", step=2))
    _, *told = await scan(store, since=begin.begin.mark, erased_only=True)
    assert sorted(one.group.task.task_id for one in told) == ["c", "e"]
    assert {one.group.reason for one in told} == {"erased"}
    begin, *told = await scan(store, since="", erased_only=True)
    assert not begin.begin.changes_only
    assert [(one.group.task.task_id, one.group.state) for one in told] == [
        ("a", TRAINED),
        *((name, common_pb2.GROUP_STATE_TOMBSTONED) for name in "bce"),
    ]
    assert not any(one.trajectories or one.group.task.domain for one in told)


async def test_payload_without_a_digest_is_returned(store):
    """A repeated submission is recognized by it."""
    put_groups(store, make_group("a", payload_json='{"q": 1}'))
    set_states(store, change("a", TRAINED, batch_id="x", step=1))
    (_, told) = await scan(store, since="")
    assert told.group.task.payload_json == '{"q": 1}'


async def test_changes_are_returned_page_by_page(store):
    """Any number, in messages within the limit; a task without a group counts as moved."""
    mark = mark_of(store)
    put_groups(store, *(make_group(f"t{index}", index) for index in range(1200)))
    append(store, make_turn("orphan:0:0"))
    begin, *pages = await scan(store, since=mark, together=True)
    assert begin.begin.changes_only
    assert [1 + len(page.more) for page in pages] == [512, 512, 177]
    groups = [one.group for page in pages for one in (page, *page.more)]
    assert len({one.task.task_id for one in groups}) == 1201
    moved = [one.task.task_id for one in groups if one.state == common_pb2.GROUP_STATE_MOVED]
    assert moved == ["orphan"]
