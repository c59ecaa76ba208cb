"""Damaged states and records of groups on the only copy of a shard: writes go past them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import DataLoss, FailedPrecondition, NotFound
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import FreeGroups, MarkOrphans
from services.pool.maintenance.backup.backup import backup, check
from services.pool.maintenance.repair import copy_in, repair
from services.pool.storage.groups.settled_index import settled_after
from services.pool.storage.keys import group_key
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_turn
from tests.support.pool.servicer import make_servicer
from tests.support.pool.store import append, change, commit, put_groups, seal, set_states
from tests.support.pool.sweeper import Direct

FLIPPED = b"\0\0\0\0no such checksum"
PENDING = common_pb2.GROUP_STATE_PENDING
TRAINED = common_pb2.GROUP_STATE_TRAINED
TOMBSTONED = common_pb2.GROUP_STATE_TOMBSTONED
OpenStore = Callable[..., PoolStore]


class Call:
    """A gRPC context without a deadline."""

    def time_remaining(self) -> None:
        return None


def flip(store: PoolStore, table: Table, task_id: str) -> None:
    store.write(lambda records: records.put_checksummed(table, group_key(task_id), FLIPPED))


async def set_over_grpc(
    store: PoolStore, *changes: pool_pb2.SetGroupStatesRequest.Change, fence: int = 1
) -> None:
    servicer = make_servicer(store, writer=Direct(store))
    request = pool_pb2.SetGroupStatesRequest(changes=changes, fence=fence)
    await servicer.SetGroupStates(request, Call())


async def seal_over_grpc(store: PoolStore, trajectory_id: str, *, turns: int) -> None:
    servicer = make_servicer(store, writer=Direct(store))
    request = pool_pb2.SealTrajectoryRequest(
        trajectory_id=trajectory_id,
        domain="code",
        turns=turns,
        state=common_pb2.TRAJECTORY_STATE_SEALED,
    )
    await servicer.SealTrajectory(request, Call())


def stored_state(store: PoolStore, task_id: str) -> common_pb2.GroupRecord:
    def look(records: Any) -> common_pb2.GroupRecord:
        return common_pb2.GroupRecord.FromString(
            bytes(records.get(Table.STATES, group_key(task_id)))
        )

    return store.read(look)


def damage_of(store: PoolStore) -> list[str]:
    """What is wrong with its files; closes it."""
    store.close()
    return [str(one) for one in check(store.directory, lambda done, of: None)]


def settled(store: PoolStore) -> list[str]:
    return [
        entry.task_id for entry in store.read(lambda records: list(settled_after(records, b"")))
    ]


def overwritten() -> float:
    return REGISTRY.get_sample_value("forge_pool_repairs_total", {"outcome": "overwritten"}) or 0.0


@pytest.mark.parametrize("before", [PENDING, TOMBSTONED, TRAINED])
async def test_damaged_state_is_replaced_by_the_next_one(store, before):
    """For any damaged state: the other states of the call are stored, the shard is whole, and the
    damage is counted."""
    put_groups(store, make_group("a"), make_group("b", 1), make_group("c", 2))
    append(store, make_turn("a:0:0"))
    seal(store, "a:0:0")
    set_states(store, change("c", TRAINED, batch_id="x", step=1))
    if before != PENDING:
        set_states(store, change("a", before, batch_id="x", step=1))
    flip(store, Table.STATES, "a")
    count = overwritten()
    await set_over_grpc(
        store,
        change("a", TRAINED, batch_id="y", step=2),
        change("b", TRAINED, batch_id="y", step=2),
    )
    assert [stored_state(store, name).step for name in "abc"] == [2, 2, 1]
    assert sorted(settled(store)) == ["a", "b", "c"]
    assert overwritten() == count + 1
    assert damage_of(store) == []


async def test_damaged_state_is_replaced_by_a_pending_one(store):
    """A rewind removes the group from the index of freeable groups."""
    put_groups(store, make_group("a"))
    set_states(store, change("a", TRAINED, batch_id="x", step=1))
    flip(store, Table.STATES, "a")
    await set_over_grpc(store, change("a", PENDING))
    assert settled(store) == [] and damage_of(store) == []


async def test_lost_state_is_replaced(store):
    """If the group's record exists; without a record the group stays unknown."""
    put_groups(store, make_group("a"))
    store.write(lambda records: records.put_checksummed(Table.STATES, b"a", None))
    await set_over_grpc(store, change("a", TRAINED, batch_id="x", step=1))
    with pytest.raises(NotFound, match="group b is not on this shard"):
        await set_over_grpc(store, change("b", TRAINED, step=1))
    assert damage_of(store) == []


async def test_group_with_a_damaged_record_accepts_a_state(store):
    """Its state is stored and indexed, counters count the readable part, and its record stays."""
    put_groups(store, make_group("a"), make_group("b", 1))
    set_states(store, change("a", TRAINED, batch_id="x", step=1))
    flip(store, Table.GROUPS, "a")
    await set_over_grpc(
        store, change("a", TOMBSTONED, reason="lost"), change("b", TRAINED, batch_id="x", step=1)
    )
    assert stored_state(store, "a").state == TOMBSTONED
    assert damage_of(store) == ["groups a: the checksum does not match"]


async def test_freed_group_with_a_damaged_state_stays_freed(store):
    """Its trajectories show it: it may end otherwise, but is never sampled again."""
    put_groups(store, make_group("a"))
    append(store, make_turn("a:0:0"))
    seal(store, "a:0:0")
    set_states(store, change("a", TRAINED, batch_id="x", step=1))
    commit(store, FreeGroups(task_ids=("a",), covered_step=1, max_records=9, now_unix_s=200.0))
    flip(store, Table.STATES, "a")
    with pytest.raises(FailedPrecondition, match="group a was freed"):
        await set_over_grpc(store, change("a", PENDING))
    await set_over_grpc(store, change("a", TRAINED, batch_id="x", step=1))
    assert stored_state(store, "a").freed_unix_s
    with pytest.raises(FailedPrecondition, match="was freed"):
        append(store, make_turn("a:1:0"))
    assert damage_of(store) == []


@pytest.mark.parametrize("table", [Table.STATES, Table.GROUPS])
async def test_damaged_group_blocks_no_turn_and_no_seal(store, table):
    """Its rollouts are stored and closed; a check names the same damage as before."""
    put_groups(store, make_group("a"))
    flip(store, table, "a")
    append(store, make_turn("a:0:0"))
    await seal_over_grpc(store, "a:0:0", turns=1)
    assert damage_of(store) == [f"{table.value} a: the checksum does not match"]


async def test_damaged_trajectory_cannot_be_sealed(store):
    """No unreadable trajectory is sealed."""
    append(store, make_turn("a:0:0"))
    ((key, _),) = store.read(lambda records: list(records.scan_checksummed(Table.TURNS)))
    store.write(lambda records: records.put_checksummed(Table.TURNS, key, FLIPPED))
    with pytest.raises(DataLoss, match="in turns does not match"):
        await seal_over_grpc(store, "a:0:0", turns=1)


def test_damaged_record_blocks_no_new_group(store):
    """Neither the record of a group that is sent again, nor the mark of an orphan."""
    append(store, make_turn("lost:0:0"))
    commit(store, MarkOrphans(task_ids=("lost",), now_unix_s=100.0))
    put_groups(store, make_group("a"))
    flip(store, Table.STATES, "lost")
    flip(store, Table.GROUPS, "a")
    put_groups(store, make_group("a"), make_group("lost", 1), make_group("new", 2))
    assert [stored_state(store, name).state for name in ("lost", "new")] == [PENDING, PENDING]
    assert settled(store) == []
    assert damage_of(store) == ["groups a: the checksum does not match"]


def test_damaged_state_is_not_marked_as_an_orphan(store):
    """It stays as it is, and other orphans are marked."""
    append(store, make_turn("lost:0:0"))
    put_groups(store, make_group("a"))
    flip(store, Table.STATES, "a")
    assert commit(store, MarkOrphans(task_ids=("a", "lost"), now_unix_s=100.0)) == 1


def test_damaged_end_of_the_change_log_blocks_no_seal(store):
    """New numbers are above every earlier number, so no cursor misses a change."""
    for index in range(3):
        append(store, make_turn(f"a:{index}:0"))
    seal(store, "a:0:0")
    seal(store, "a:1:0", now_unix_s=200.0)
    store.write(lambda records: records.put_checksummed(Table.META, b"change_log", FLIPPED))
    seal(store, "a:2:0", now_unix_s=150.0)
    (first, second, third) = store.read(
        lambda records: [int.from_bytes(key, "big") for key, _ in records.scan(Table.CHANGES)]
    )
    assert first < second < third
    assert damage_of(store) == []


async def test_repair_from_a_backup_keeps_a_replaced_state(open_store: OpenStore, tmp_path: Path):
    """A verified record is never overwritten; counters equal a recount."""
    store = open_store(shard="s0")
    put_groups(store, make_group("a"), make_group("b", 1))
    store.close()
    backup(tmp_path / "shard", tmp_path / "copy", lambda done, of: None)
    store = open_store()
    flip(store, Table.STATES, "a")
    await set_over_grpc(store, change("a", TRAINED, batch_id="x", step=1))
    flip(store, Table.GROUPS, "b")
    store.close()
    assert repair(tmp_path / "shard", copy_in(tmp_path / "copy"), lambda done, of: None) == []
    assert stored_state(open_store(), "a").step == 1
