"""Erasure of tasks: what goes from the records, what stays, and what brings nothing back."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from forge.core.errors import FailedPrecondition, InvalidArgument
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import EraseTasks
from services.pool.data.removal.task_erasure import Erased, tasks_with
from services.pool.data.repair.record_repair import repair_unit
from services.pool.maintenance.backup import backup
from services.pool.maintenance.backup.backup_erasure import erase_in
from services.pool.storage.keys import group_key
from services.pool.storage.record_copies import copied_records, units_of
from services.pool.storage.records import Records
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from services.pool.validation import check_erase
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.replicas import Node, catching_up, linked, settle_reads
from tests.support.pool.store import (
    append,
    change,
    commit,
    put_groups,
    reward,
    seal,
    set_states,
)

MARKER = "marker-of-alice"
STATES = common_pb2.GroupState
SIZES = (10, 1500, 2100, 3000, 3900, 10_000)
"""Sizes of turns: in a leaf page, in one overflow page, in several."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


def fill(store: PoolStore, task_id: str, index: int, *, marker: str = "", user: str = "") -> None:
    """A group with two trajectories, its marker in each place of free text."""
    group = make_group(task_id, index, payload_json=f'{{"prompt": "{marker}"}}')
    group.task.tag, group.task.user = f"{marker}tag", user
    group.task.metadata["note"] = marker
    put_groups(store, group)
    for rollout in range(2):
        trajectory_id = f"{task_id}:{rollout}:0"
        append(
            store,
            *(
                make_turn(
                    trajectory_id,
                    number,
                    parent=-1,
                    messages_json=(marker or "x") * (size // len(marker or "x") + 1),
                )
                for number, size in enumerate(SIZES)
            ),
        )
        rewards = [make_reward("outcome"), make_reward(f"{marker}event")]
        rewards[1].name = f"{marker}name"
        if rollout == 0:
            seal(store, trajectory_id, turns=len(SIZES), rewards=rewards)
        else:
            seal(
                store,
                trajectory_id,
                state=common_pb2.TRAJECTORY_STATE_ABANDONED,
                reason=f"{marker} gave up",
                rewards=rewards,
            )


def erase(store: PoolStore, *task_ids: str, max_records: int = 1000) -> Erased:
    """Erases until nothing is left."""
    total = Erased(unfinished=True)
    while total.unfinished:
        command = EraseTasks(task_ids=task_ids, max_records=max_records, now_unix_s=200.0)
        total = total.plus(commit(store, command))
    return total


def _records_of(records: Records, table: Table) -> list[tuple[bytes, bytes]]:
    return list(records.scan_checksummed(table))


def stored_text(store: PoolStore) -> bytes:
    """All shared records as they lie on disk; keys of the tables too, without the tombstone's."""
    return b"".join(
        key + value
        for table in Table
        if table is not Table.JOURNAL
        for key, value in store.read(partial(_records_of, table=table))
    )


@pytest.mark.parametrize("settled", ["trained", "tombstoned", "pending"])
def test_erased_task_leaves_no_text_and_a_whole_shard(store: PoolStore, settled: str) -> None:
    """Turns, rewards, reasons, payload, tag and user are deleted, in steps of any size; the check
    of the shard finds no damage, counters included; records of other tasks stay."""
    fill(store, "a", 0, marker=MARKER, user="alice")
    fill(store, "b", 1, marker="marker-of-bob", user="bob")
    if settled == "trained":
        set_states(store, change("a", STATES.GROUP_STATE_TRAINED, step=1, batch_id="x"))
    elif settled == "tombstoned":
        set_states(store, change("a", STATES.GROUP_STATE_TOMBSTONED, reason=MARKER))
    assert erase(store, "a", max_records=3) == Erased(
        groups=1, trajectories=2, turns=2 * len(SIZES), rewards=4
    )
    assert MARKER.encode() not in stored_text(store) and b"alice" not in stored_text(store)
    assert b"marker-of-bob" in stored_text(store)
    assert erase(store, "a", "unknown") == Erased()
    store.close()
    assert list(backup.check(store.directory, no_progress)) == []


def test_erased_task_refuses_writes_and_ignores_states(store: PoolStore) -> None:
    """Late turns, rewards and seals are refused; a state of the scheduler has no effect, so the
    scheduler does not wait forever; a repeated submission changes nothing."""
    fill(store, "a", 0, marker=MARKER)
    erase(store, "a")
    with pytest.raises(FailedPrecondition, match="an operator erased"):
        append(store, make_turn("a:0:0", 0, messages_json=MARKER))
    with pytest.raises(FailedPrecondition, match="an operator erased"):
        reward(store, make_reward("late"), trajectory_id="a:1:0")
    with pytest.raises(FailedPrecondition, match="an operator erased"):
        seal(store, "a:0:0", turns=0)
    for state in (STATES.GROUP_STATE_BATCHED, STATES.GROUP_STATE_TRAINED):
        set_states(store, change("a", state, batch_id="x", step=3))
    fill_again = make_group("a", 0, payload_json=f'{{"prompt": "{MARKER}"}}')
    put_groups(store, fill_again)
    (scanned,) = store.scan().next_page() or ()
    assert scanned.group.state == STATES.GROUP_STATE_TOMBSTONED
    assert (scanned.group.reason, scanned.group.task.payload_json) == ("erased", "")
    assert MARKER.encode() not in stored_text(store)


def test_erased_orphans_stay_refused(store: PoolStore) -> None:
    """Orphans of the task id are erased too, marked by a sweep or not."""
    append(store, make_turn("a:0:0", messages_json=MARKER))
    assert erase(store, "a") == Erased(trajectories=1, turns=1)
    with pytest.raises(FailedPrecondition, match="an operator erased"):
        append(store, make_turn("a:0:1", messages_json=MARKER))
    assert MARKER.encode() not in stored_text(store)


def test_tasks_are_selected_by_user_and_by_tag(store: PoolStore) -> None:
    """Exactly one selection; an erased group has neither user nor tag."""
    fill(store, "a", 0, marker="x", user="alice")
    fill(store, "b", 1, marker="x", user="bob")
    fill(store, "c", 2, marker="y", user="alice")

    def selected(**wanted: str) -> list[str]:
        return store.read(lambda records: tasks_with(records, **({"user": "", "tag": ""} | wanted)))

    assert selected(user="alice") == ["a", "c"] and selected(tag="xtag") == ["a", "b"]
    erase(store, "a")
    assert selected(user="alice") == ["c"] and selected(tag="xtag") == ["b"]
    for wrong in ({}, {"user": "a", "tag": "b"}, {"task_ids": ["a"], "user": "b"}):
        with pytest.raises(InvalidArgument, match="exactly one"):
            check_erase(pool_pb2.EraseTrajectoriesRequest(**wrong))


async def test_absent_follower_erases_on_its_return(node: Callable[[str], Node]) -> None:
    """By the journal and by a whole copy: tombstones are records, so they arrive with the rest, and
    the follower rewrites its file."""
    leader, follower = node("leader"), node("follower")
    leader.lead()
    fill(leader.store, "a", 0, marker=MARKER)
    async with linked(leader, follower) as link:
        await settle_reads(link, rounds=20)
    assert MARKER.encode() in stored_text(follower.store)
    erase(leader.store, "a")
    assert MARKER.encode() in stored_text(follower.store)
    async with linked(leader, follower) as link:
        await settle_reads(link, rounds=20)
    assert catching_up(leader, follower).way == "journal"
    assert follower.dump() == leader.dump()
    assert MARKER.encode() not in stored_text(follower.store)


def test_repair_from_an_older_copy_restores_no_erased_record(
    node: Callable[[str], Node],
) -> None:
    """A damaged record of an erased task is not replaced by a prompt of an older copy."""
    leader, old = node("leader"), node("old")
    leader.lead()
    for each in (leader, old):
        fill(each.store, "a", 0, marker=MARKER)
    erase(leader.store, "a")
    since = leader.state().position
    for table, key in ((Table.GROUPS, group_key("a")), (Table.TRAJECTORIES, _first(old.store))):
        leader.store.write(
            partial(Records.put_checksummed, table=table, key=key, value=b"\0\0\0\0bad")
        )
        (unit,) = units_of(table, key)
        copy = old.store.read(partial(copied_records, units=[unit]))
        assert MARKER.encode() in b"".join(copy.values.values())
        leader.store.write(partial(repair_unit, unit=unit, copy=copy, since=since))
        assert MARKER.encode() not in stored_text(leader.store)
    leader.store.close()
    assert list(backup.check(leader.store.directory, no_progress)) == []


def _first(store: PoolStore) -> bytes:
    def first(records: Records) -> bytes:
        return next(key for key, _ in records.scan_checksummed(Table.TRAJECTORIES))

    return store.read(first)


def test_erased_backup_has_no_raw_byte_of_the_task(
    open_store: Callable[..., PoolStore], tmp_path: Path
) -> None:
    """Values of all page kinds, written between others and over freed pages: the file contains the
    marker before, and after an erasure of the records alone; not after the rewrite. A second
    erasure changes nothing; the directory of an instance is refused."""
    store = open_store(shard="s0")
    order = list(range(40))
    random.Random(0).shuffle(order)
    for index in order:
        marked = index % 4 == 0
        fill(store, f"t{index}", index, marker=MARKER if marked else "", user="alice" * marked)
    marked_tasks = [f"t{index}" for index in range(0, 40, 4)]
    copy = tmp_path / "backup"
    store.close()
    backup.backup(store.directory, copy, no_progress)
    store = open_store()
    erase(store, *marked_tasks)
    for index in range(40, 50):
        fill(store, f"t{index}", index)
    assert MARKER.encode() in (store.directory / "data.mdb").read_bytes()
    request = pool_pb2.EraseTrajectoriesRequest(user="alice")
    store.close()
    with pytest.raises(FailedPrecondition, match="data_dir of a pool instance"):
        erase_in(store.directory, request, no_progress)
    assert erase_in(copy, request, no_progress).groups == len(marked_tasks)
    assert MARKER.encode() not in (copy / "data.mdb").read_bytes()
    assert erase_in(copy, request, no_progress) == Erased()
    backup.compact(store.directory, no_progress, purge=True)
    assert MARKER.encode() not in (store.directory / "data.mdb").read_bytes()
    assert list(backup.check(copy, no_progress)) == []


def test_one_transaction_erases_a_bounded_number_of_bytes(store: PoolStore) -> None:
    """The bytes of all tasks count together, so the writer is free again soon."""
    for number, task_id in enumerate(("a", "b")):
        put_groups(store, make_group(task_id, number))
        append(store, make_turn(f"{task_id}:0:0", 0, messages_json="x" * (9 << 20)))
    command = EraseTasks(task_ids=("a", "b"), max_records=99, now_unix_s=200.0)
    assert commit(store, command) == Erased(groups=1, trajectories=1, turns=1, unfinished=True)
    assert commit(store, command) == Erased(groups=1, trajectories=1, turns=1)
