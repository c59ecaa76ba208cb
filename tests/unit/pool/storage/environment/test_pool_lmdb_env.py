"""The files of a shard: growth, a full disk, damage, and exclusive use."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import ConfigError, DataLoss, ResourceExhausted
from forge.core.trajectory import TaskId, parse_trajectory_id
from forge.v1 import common_pb2
from services.pool import validation
from services.pool.actors.writer import Writer
from services.pool.data.commands import AppendTurns, FreeGroups, PutGroups
from services.pool.data.removal.freed_groups import Freed
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.environment.migrations import SCHEMA_VERSION
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import damage, make_group, make_turn
from tests.support.pool.store import change, commit, groups_page, put_groups, set_states

KIB, MIB = 1 << 10, 1 << 20


def turn_of(index: int, size_bytes: int = 16 * KIB) -> common_pb2.Turn:
    return make_turn(f"task:{index}:0", messages_json=chr(97 + index % 26) * size_bytes)


def append(store: PoolStore, *turns: common_pb2.Turn) -> None:
    new = tuple(validation.new_turn(turn.SerializeToString()) for turn in turns)
    (answer,) = store.commit([AppendTurns(turns=new)])
    if isinstance(answer, Exception):
        raise answer
    assert all(refused is None for refused in answer)


def fetch(store: PoolStore, trajectory_id: str) -> common_pb2.Trajectory:
    (stored,) = store.trajectories([parse_trajectory_id(trajectory_id)])
    return common_pb2.Trajectory.FromString(stored)


def stored_turns(store: PoolStore, count: int) -> list[common_pb2.Turn]:
    return [fetch(store, f"task:{index}:0").turns[0] for index in range(count)]


def test_map_grows_on_demand(open_store):
    """Data eight times the first map size is stored, and a reopened shard has all of it."""
    store = open_store(map_bytes=MIB)
    for index in range(8):
        append(store, turn_of(index, MIB))
    assert store.stats().map_bytes >= 8 * MIB
    assert stored_turns(open_store(map_bytes=MIB), 8) == [turn_of(i, MIB) for i in range(8)]


def test_turn_larger_than_the_map_is_stored(open_store):
    """The map doubles as often as one commit needs."""
    store = open_store(map_bytes=MIB)
    append(store, turn_of(0, 10 * MIB))
    assert fetch(store, "task:0:0").turns == [turn_of(0, 10 * MIB)]


def test_readers_continue_while_the_map_grows(open_store):
    """Concurrent reads return whole, correct trajectories across every growth."""
    store = open_store(map_bytes=MIB)
    append(store, turn_of(0))
    done = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not done.is_set():
            try:
                if fetch(store, "task:0:0").turns != [turn_of(0)]:
                    wrong.append("other content")
            except Exception as error:
                wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for index in range(1, 50):
        append(store, turn_of(index, 256 * KIB))
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert store.stats().map_bytes >= 8 * MIB


@contextmanager
def snapshots_elsewhere(directory: Path, count: int) -> Iterator[None]:
    """Another process holds them; at the end it is killed."""
    program = (
        "import lmdb, sys, time\n"
        "opened = lmdb.open(sys.argv[1], readonly=True)\n"
        f"held = [opened.begin() for _ in range({count})]\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, directory], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.kill()


def test_tools_take_no_reader_slot(open_store, tmp_path):
    """Checks and backups of a shard that was just opened and not read."""
    store = open_store(max_readers=2)
    with snapshots_elsewhere(tmp_path / "shard", 32):
        turn = validation.new_turn(make_turn().SerializeToString())
        (answer,) = Writer(store).receive_batch([AppendTurns(turns=(turn,))])
        assert answer == (None,)
        assert store.stats().turns == 1


def test_shard_at_its_map_limit_refuses_turns(open_store):
    """At map_max_bytes turns are RESOURCE_EXHAUSTED, stored data is whole, and a higher limit
    accepts the same turn."""
    store = open_store(map_bytes=MIB, map_max_bytes=2 * MIB)
    append(store, turn_of(0))
    with pytest.raises(ResourceExhausted, match="map_max_bytes 2097152"):
        append(store, turn_of(1, 4 * MIB))
    assert fetch(store, "task:0:0").turns == [turn_of(0)]
    store = open_store(map_bytes=MIB, map_max_bytes=64 * MIB)
    append(store, turn_of(1, 4 * MIB))
    assert fetch(store, "task:1:0").turns == [turn_of(1, 4 * MIB)]


@dataclass(frozen=True, kw_only=True)
class SmallDisk:
    path: Path
    grow: Callable[[], object]


@contextmanager
def small_mount(path: Path) -> Iterator[SmallDisk]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs privileges this process lacks")
    more = ["mount", "-o", "remount,size=64m", str(path)]
    yield SmallDisk(path=path, grow=lambda: subprocess.run(more, check=True))
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def small_files(path: Path) -> Iterator[SmallDisk]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, limits[1]))
    lift = partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
    yield SmallDisk(path=path, grow=lift)
    lift()


@pytest.fixture(params=[small_mount, small_files])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    """A place that really runs out of room after 4 MiB, and can be given more."""
    with request.param(tmp_path) as disk:
        yield disk


def test_full_disk_loses_no_acknowledged_turn(small_disk):
    """On a full disk every append is RESOURCE_EXHAUSTED, every acknowledged turn stays readable,
    also after a restart, and with room again appends continue."""
    store = PoolStore(small_disk.path / "shard")
    acknowledged = 0
    with pytest.raises(ResourceExhausted, match="nothing of it is stored"):
        while True:
            append(store, turn_of(acknowledged, 100 * KIB))
            acknowledged += 1
    assert acknowledged > 10
    for _ in range(3):
        with pytest.raises(ResourceExhausted):
            append(store, turn_of(acknowledged, MIB))
    expected = [turn_of(i, 100 * KIB) for i in range(acknowledged)]
    assert stored_turns(store, acknowledged) == expected
    store.close()
    store = PoolStore(small_disk.path / "shard")
    assert stored_turns(store, acknowledged) == expected
    small_disk.grow()
    append(store, turn_of(acknowledged, MIB))
    assert stored_turns(store, acknowledged) == expected
    assert fetch(store, f"task:{acknowledged}:0").turns == [turn_of(acknowledged, MIB)]
    store.close()


def settle(store: PoolStore, index: int) -> None:
    """Tombstones the group of `turn_of_group(index)`."""
    put_groups(store, make_group(f"task{index}", index))
    set_states(store, change(f"task{index}", common_pb2.GROUP_STATE_TOMBSTONED))


def turn_of_group(index: int, size_bytes: int) -> common_pb2.Turn:
    return make_turn(f"task{index}:0:0", messages_json=chr(97 + index % 26) * size_bytes)


def free(store: PoolStore, *indices: int) -> Freed:
    names = tuple(f"task{index}" for index in indices)
    command = FreeGroups(task_ids=names, covered_step=0, max_records=512, now_unix_s=100.0)
    found: Freed = commit(store, command)
    return found


def test_full_disk_accepts_turns_once_groups_are_freed(small_disk):
    """With the disk full to the last page, settled groups can be freed, their pages are used again
    without growth of the file, and all other groups are whole."""
    store = PoolStore(small_disk.path / "shard")
    count = 0
    with pytest.raises(ResourceExhausted):
        while True:
            append(store, turn_of_group(count, 100 * KIB))
            settle(store, count)
            count += 1
    assert "the disk refused the commit" in store.lack_of_room
    used_bytes = store.environment.used_bytes
    for index in range(count // 2):
        assert free(store, index).groups == 1
    assert not store.short_of_room
    # The rest is the room of what stays of the groups: records, indexes, counters.
    again = count // 2 - 3
    for index in range(count + 1, count + 1 + again):
        append(store, turn_of_group(index, 100 * KIB))
    assert store.environment.used_bytes <= used_bytes + MIB // 2
    for index in (*range(count // 2, count), *range(count + 1, count + 1 + again)):
        assert fetch(store, f"task{index}:0:0").turns == [turn_of_group(index, 100 * KIB)]
    store.close()


@pytest.mark.parametrize("full", ["disk", "map"])
def test_pages_of_a_killed_backup_are_used_again(small_disk, full):
    """Pages are kept for a snapshot until its reader is found dead; a full disk or map starts that
    search."""
    ceiling = {"disk": 1 << 30, "map": 3 * MIB}[full]
    store = PoolStore(small_disk.path / "shard", map_bytes=MIB, map_max_bytes=ceiling)
    count = 0
    with suppress(ResourceExhausted):
        while True:
            append(store, turn_of_group(count, 100 * KIB))
            settle(store, count)
            count += 1
    with snapshots_elsewhere(small_disk.path / "shard", 1):
        assert free(store, *range(count // 2)).groups == count // 2
    # What a commit has freed is there for the one after the next.
    assert free(store, count // 2).groups == 1
    for index in range(count + 1, count + count // 2 - 2):
        append(store, turn_of_group(index, 100 * KIB))
    store.close()


def test_freed_pages_count_as_room(open_store):
    """A shard at the end of its map refuses turns at its reserve, and accepts them again once the
    reserve is free."""
    store = open_store(map_bytes=MIB, map_max_bytes=8 * MIB, disk_reserve_bytes=2 * MIB)
    count = 0
    with pytest.raises(ResourceExhausted, match="disk_reserve_bytes 2097152"):
        while True:
            append(store, turn_of_group(count, 100 * KIB))
            settle(store, count)
            count += 1
    assert store.short_of_room
    free(store, *range(10))
    assert not store.short_of_room
    append(store, turn_of_group(count, 100 * KIB))


def test_states_are_stored_when_turns_are_refused(open_store):
    """Below the reserve turns are refused while groups and their states are written."""
    store = open_store(disk_reserve_bytes=1 << 62)
    with pytest.raises(ResourceExhausted, match="disk_reserve_bytes"):
        append(store, turn_of(0))
    assert store.commit([PutGroups(groups=(make_group(),), fence=1)]) == [None]


def test_damaged_turn_makes_one_trajectory_unreadable(open_store, tmp_path):
    """One flipped byte on disk, named by its trajectory; no other is affected."""
    store = open_store()
    append(store, make_turn("t:0:0", messages_json="NEEDLE"), make_turn("t:1:0"))
    store.close()
    damage(tmp_path / "shard", b"NEEDLE")
    store = PoolStore(tmp_path / "shard")
    with pytest.raises(DataLoss, match=r"record b't:.*' in turns"):
        fetch(store, "t:0:0")
    assert len(fetch(store, "t:1:0").turns) == 1
    store.close()


def test_damaged_group_is_tombstoned_and_others_are_returned(open_store, tmp_path):
    """A new leader gets all others, and the queue index of the damaged one; a trained group stays
    trained."""
    store = open_store()
    groups = (make_group(f"t{n}", n, payload_json=f"NEEDLE{n % 2}") for n in range(4))
    put_groups(store, *groups)
    set_states(store, change("t2", common_pb2.GROUP_STATE_TRAINED, batch_id="b", step=7))
    store.close()
    damage(tmp_path / "shard", b"NEEDLE0")
    store = PoolStore(tmp_path / "shard")
    found = [each.group for each in groups_page(store).groups]
    assert [(group.task.task_id, group.queue_index) for group in found] == [
        (f"t{n}", n) for n in range(4)
    ]
    lost, kept, trained, _ = found
    assert lost.state == common_pb2.GROUP_STATE_TOMBSTONED
    assert "record b't0' in groups" in lost.reason
    assert lost.task.purpose == common_pb2.PURPOSE_TRAIN and lost.pool_shard == kept.pool_shard
    assert kept.state == common_pb2.GROUP_STATE_PENDING and kept.task.payload_json == "NEEDLE1"
    assert (trained.state, trained.step) == (common_pb2.GROUP_STATE_TRAINED, 7)
    scan = store.scan_tasks([TaskId("t0"), TaskId("t1")])
    page = scan.next_page()
    assert page is not None
    assert [each.group.task.task_id for each in page] == ["t1"]
    assert scan.next_page() is None
    store.close()


def test_other_schema_version_is_refused_with_both_numbers(tmp_path):
    """A shard of another schema is not changed, and the message names the way out."""
    settings: dict[str, Any] = {"map_bytes": MIB, "map_max_bytes": MIB, "max_readers": 4}
    environment = Environment(tmp_path, **settings)
    environment.write(lambda records: records.put(Table.META, b"schema_version", b"999"))
    environment.close()
    with pytest.raises(ConfigError, match=f"version 999.*version {SCHEMA_VERSION}"):
        Environment(tmp_path, **settings)


def test_data_directory_in_use_is_refused(open_store, tmp_path):
    """In one line; it is free again once the first instance has closed it."""
    store = open_store()
    with pytest.raises(ConfigError, match="in use by another pool instance"):
        PoolStore(tmp_path / "shard")
    store.close()
    PoolStore(tmp_path / "shard").close()


def test_file_that_is_no_shard_is_refused(tmp_path):
    """Garbage in place of the data is DATA_LOSS, never overwritten."""
    (tmp_path / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(DataLoss, match="no pool shard"):
        PoolStore(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes().startswith(b"not a database")


def test_unusable_directory_is_refused(tmp_path):
    """A path that cannot be a directory is a configuration error that names it."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data_dir .*file/shard"):
        PoolStore(tmp_path / "file" / "shard")
