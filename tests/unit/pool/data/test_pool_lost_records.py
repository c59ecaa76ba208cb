"""Records that are lost while every checksum that is left matches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forge.core.errors import DataLoss, FailedPrecondition
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from services.pool.data.commands import FreeGroups
from services.pool.data.reads import group_scan
from services.pool.maintenance.backup import backup
from services.pool.storage.keys import queue_key, reward_key, trajectory_key, turn_key
from services.pool.storage.records import Records, TrajectoryHeader, decode_header, encode_header
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.damage import delete_record, flip_key, put_raw, raw_value
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    ABANDONED,
    append,
    change,
    commit,
    groups_page,
    put_groups,
    reward,
    seal,
    set_states,
)

NAME = parse_trajectory_id("task:0:0")
KEY = trajectory_key(NAME)
OpenStore = Callable[..., PoolStore]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "shard"


def sealed(store: PoolStore) -> None:
    """Three turns and two rewards, one of them late."""
    append(store, *(make_turn("task:0:0", index) for index in range(3)))
    seal(store, turns=3, rewards=[make_reward("early", value=1.0)])
    reward(store, make_reward("late", value=2.0, kind=common_pb2.REWARD_KIND_OUTCOME))


def fetch(store: PoolStore) -> common_pb2.Trajectory:
    (found,) = store.trajectories([NAME])
    return common_pb2.Trajectory.FromString(found)


def found_by_check(directory: Path) -> list[str]:
    return [str(damage) for damage in backup.check(directory, lambda done, of: None)]


def after(store: PoolStore, open_store: OpenStore, damage: Callable[[], object]) -> PoolStore:
    """The store, opened again after its closed files were damaged."""
    store.close()
    damage()
    return open_store()


def test_sealed_trajectory_with_a_late_reward_is_read_back(store, open_store, directory):
    """Also after a restart, and its check finds no damage."""
    sealed(store)
    store = open_store()
    assert len(fetch(store).turns) == 3
    assert {event.event_id for event in fetch(store).rewards} == {"early", "late"}
    store.close()
    assert found_by_check(directory) == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_lost_turn_is_data_loss(store, open_store, directory, lost):
    """A sealed trajectory is never returned shorter: the error names the lost turn."""
    sealed(store)
    key = turn_key(KEY, lost)
    store = after(store, open_store, lambda: delete_record(directory, Table.TURNS, key))
    with pytest.raises(DataLoss, match=rf"task:0:0 lacks 1 of its 3 turns: {lost}"):
        fetch(store)
    store.close()
    assert any("trajectories task:0:0" in line for line in found_by_check(directory))


@pytest.mark.parametrize("event_id", ["early", "late"])
def test_lost_reward_is_data_loss(store, open_store, directory, event_id):
    """It never counts as 0: not in the trajectory, its summary or a scan."""
    put_groups(store, make_group("task"))
    sealed(store)
    key = reward_key(KEY, event_id)
    store = after(store, open_store, lambda: delete_record(directory, Table.REWARDS, key))
    kept = {"early": "late", "late": "early"}[event_id]
    for read in (fetch, lambda store: store.summaries([NAME])):
        with pytest.raises(DataLoss, match=rf"task:0:0 has 1 of its 2 rewards: {kept}"):
            read(store)
    (group,) = groups_page(store).groups
    assert not group.trajectories
    store.close()
    (line,) = found_by_check(directory)
    assert line.startswith("trajectories task:0:0: has 1 of its 2 rewards")


def test_replaced_record_is_data_loss(store, open_store, directory):
    """A turn that was replaced with a valid checksum is not the sealed turn."""
    append(store, make_turn("task:0:0", 0, messages_json="other"))
    store.close()
    stale = raw_value(directory, Table.TURNS, turn_key(KEY, 0))
    delete_record(directory, Table.TURNS, turn_key(KEY, 0))
    store = open_store()
    sealed(store)
    key = turn_key(KEY, 0)
    store = after(store, open_store, lambda: put_raw(directory, Table.TURNS, key, stale))
    with pytest.raises(DataLoss, match="task:0:0 has other turns than it was closed with"):
        fetch(store)
    store.close()
    assert len(found_by_check(directory)) == 1


def test_late_reward_does_not_hide_a_lost_reward(store, open_store, directory):
    """No reward is added to damaged rewards: the new digest would confirm them."""
    sealed(store)
    key = reward_key(KEY, "early")
    store = after(store, open_store, lambda: delete_record(directory, Table.REWARDS, key))
    with pytest.raises(DataLoss):
        reward(store, make_reward("later"))
    with pytest.raises(DataLoss):
        fetch(store)


def test_abandoned_trajectory_is_compared_with_its_digests(store, open_store, directory):
    """It has the turns and rewards that it was closed with."""
    append(store, make_turn("task:0:0", 0), make_turn("task:0:0", 2))
    seal(store, turns=0, state=ABANDONED)
    reward(store, make_reward("late"))
    assert len(fetch(store).turns) == 2
    key = turn_key(KEY, 2)
    store = after(store, open_store, lambda: delete_record(directory, Table.TURNS, key))
    with pytest.raises(DataLoss, match="has 1 of its 2 turns"):
        fetch(store)


def test_trajectory_closed_without_digests_is_read(store, open_store, directory):
    """Older versions wrote headers without counts of rewards and digests: these are not compared,
    and a late reward is added."""
    sealed(store)
    key = reward_key(KEY, "early")

    def rewrite(records: Records) -> None:
        stored = records.get(Table.TRAJECTORIES, KEY)
        assert stored is not None
        header = decode_header(stored)
        records.put(Table.TRAJECTORIES, KEY, as_of_before(header))

    store.write(rewrite)
    store = after(store, open_store, lambda: delete_record(directory, Table.REWARDS, key))
    assert len(fetch(store).turns) == 3
    reward(store, make_reward("later"))
    assert {event.event_id for event in fetch(store).rewards} == {"late", "later"}
    store.close()
    assert found_by_check(directory) == []


def as_of_before(header: TrajectoryHeader) -> bytes:
    """The header with the 13 fields that it had before."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode_header(header))[:13])


def test_freed_trajectory_does_not_contradict_its_digests(store, directory):
    """Without turns and rewards it keeps a summary, also when half freed."""
    put_groups(store, make_group("task"))
    sealed(store)
    set_states(store, change("task", common_pb2.GROUP_STATE_TRAINED, step=1))
    for _ in range(6):
        free = FreeGroups(task_ids=("task",), covered_step=1, max_records=1, now_unix_s=1.0)
        commit(store, free)
        (summary,) = store.summaries([NAME])
        assert summary.freed
        assert summary.rewards[0].value == 2.0
    with pytest.raises(FailedPrecondition):
        reward(store, make_reward("later"))
    store.close()
    assert found_by_check(directory) == []


@pytest.fixture
def pages_of_one(monkeypatch) -> None:
    monkeypatch.setattr(group_scan, "PAGE_GROUPS", 1)


def queued(store: PoolStore) -> list[str]:
    """Task ids by a scan of all groups."""
    return [group.group.task.task_id for group in every_group(store)]


def every_group(store: PoolStore):
    found: list[Any] = []
    scan = store.scan()
    while (page := scan.next_page()) is not None:
        found += page
    return found


PLACE = queue_key(common_pb2.PURPOSE_TRAIN, 1, "b")


@pytest.mark.usefixtures("pages_of_one")
@pytest.mark.parametrize("byte", range(len(PLACE)))
def test_flipped_queue_key_hides_no_group(store, open_store, directory, byte):
    """For any flipped byte of its entry, a scan has the group once, as its record says."""
    put_groups(store, *(make_group(name, index) for index, name in enumerate("abc")))
    store = after(store, open_store, lambda: flip_key(directory, Table.QUEUE, PLACE, byte=byte))
    groups = {group.group.task.task_id: group.group for group in every_group(store)}
    assert sorted(queued(store)) == ["a", "b", "c"]
    assert groups["b"].queue_index == 1
    assert groups["b"].state == common_pb2.GROUP_STATE_PENDING
    store.close()
    assert found_by_check(directory)


@pytest.mark.usefixtures("pages_of_one")
def test_lost_queue_key_hides_no_group(store, open_store, directory):
    """A group without an entry in the queue is found by its record."""
    put_groups(store, *(make_group(name, index) for index, name in enumerate("abc")))
    store = after(store, open_store, lambda: delete_record(directory, Table.QUEUE, PLACE))
    assert sorted(queued(store)) == ["a", "b", "c"]


@pytest.mark.usefixtures("pages_of_one")
def test_group_added_during_a_scan_is_returned_at_most_once(store):
    """It is no damage, anywhere in the queue."""
    put_groups(store, make_group("b", 5), make_group("c", 6))
    scan = store.scan()
    found = list(scan.next_page())
    put_groups(store, make_group("a", 1), make_group("d", 7))
    while (page := scan.next_page()) is not None:
        found += page
    assert [group.group.task.task_id for group in found] == ["b", "c", "d"]
