"""A damaged shard repaired from a copy of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forge.core.errors import ConfigError
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from services.pool.maintenance.backup.backup import backup
from services.pool.maintenance.repair import copy_in, repair
from services.pool.storage.environment.file_locks import InUse, lock_directory
from services.pool.storage.keys import (
    group_key,
    queue_key,
    reward_key,
    trajectory_key,
    turn_key,
)
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.damage import delete_record, flip_key
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import append, groups_page, put_groups, reward, seal

KEY = trajectory_key(parse_trajectory_id("b:0:0"))
PLACE = queue_key(common_pb2.PURPOSE_TRAIN, 1, "b")


def quiet(done: int, of: int) -> None:
    """Takes no notice."""


@pytest.fixture
def directory(store: PoolStore, open_store: Callable[..., PoolStore], tmp_path: Path) -> Path:
    """A closed shard; `copy` beside it was made before its last reward came."""
    put_groups(store, *(make_group(name, index) for index, name in enumerate("abc")))
    append(store, *(make_turn("b:0:0", index) for index in range(3)), make_turn("c:0:0"))
    seal(store, "b:0:0", turns=3, rewards=[make_reward("early")])
    store.close()
    backup(tmp_path / "shard", tmp_path / "copy", quiet)
    store = open_store()
    reward(store, make_reward("late"), trajectory_id="b:0:0")
    store.close()
    return tmp_path / "shard"


def contents(open_store: Callable[..., PoolStore]) -> object:
    store = open_store()
    groups = groups_page(store).groups
    (found,) = store.trajectories([parse_trajectory_id("b:0:0")])
    store.close()
    return found, groups


@pytest.mark.parametrize(
    ("table", "key"),
    [
        (Table.TURNS, turn_key(KEY, 0)),
        (Table.TURNS, turn_key(KEY, 2)),
        (Table.REWARDS, reward_key(KEY, "early")),
        (Table.GROUPS, group_key("b")),
        (Table.QUEUE, PLACE),
    ],
)
@pytest.mark.parametrize("how", [delete_record, flip_key])
def test_repair_restores_lost_records(directory, tmp_path, open_store, table, key, how):
    """A deleted record, or one moved onto another by a flipped bit of its key, is restored, and a
    reward newer than the copy stays."""
    before = contents(open_store)
    how(directory, table, key)
    assert repair(directory, copy_in(tmp_path / "copy"), quiet) == []
    assert contents(open_store) == before


def test_repair_leaves_damage_that_no_copy_can_mend(directory, tmp_path):
    """A reward newer than the copy cannot be restored, and no other record replaces it."""
    delete_record(directory, Table.REWARDS, reward_key(KEY, "late"))
    (left,) = repair(directory, copy_in(tmp_path / "copy"), quiet)
    assert str(left) == "trajectories b:0:0: has 1 of its 2 rewards: early"


def test_copy_of_another_shard_is_refused(directory, tmp_path):
    """Its lineage differs, under any name."""
    other = PoolStore(tmp_path / "other", shard="s0")
    other.close()
    delete_record(directory, Table.TURNS, turn_key(KEY, 0))
    with pytest.raises(ConfigError, match="is not a copy of this shard"):
        repair(directory, copy_in(tmp_path / "other"), quiet)


def test_running_shard_is_not_repaired(directory, tmp_path):
    """Its process would not notice the change."""
    delete_record(directory, Table.TURNS, turn_key(KEY, 0))
    lock = lock_directory(directory)
    with pytest.raises(InUse):
        repair(directory, copy_in(tmp_path / "copy"), quiet)
    os.close(lock)
