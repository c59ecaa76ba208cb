"""Checking a shard, and copies of it: backup, restore, compact."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from forge.core.errors import ConfigError, DataLoss, FailedPrecondition
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import FreeGroups
from services.pool.data.reads.query import query
from services.pool.maintenance.backup import backup
from services.pool.maintenance.backup.restore import restore
from services.pool.storage.change_log import TrajectoryChange, change_key
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.keys import group_key, queue_key, reward_key, trajectory_key, turn_key
from services.pool.storage.records import decode_header, encode_header
from services.pool.storage.tables import Table
from services.pool.streams.tail import read_log
from tests.support.pool.records import damage, make_group, make_reward, make_turn
from tests.support.pool.store import (
    ABANDONED,
    append,
    change,
    commit,
    fetch,
    put_groups,
    reward,
    seal,
    set_states,
)

MIB = 1 << 20


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture
def shard(open_store, tmp_path):
    """A closed shard: a sealed tree of three turns with a late reward, an abandoned trajectory, an
    open one, and two groups."""
    store = open_store(shard="s0")
    put_groups(store, make_group("a", 3), make_group("b", 4, purpose=common_pb2.PURPOSE_EVAL))
    append(store, make_turn("a:0:0"), make_turn("a:0:0", 1, prefix=5))
    append(store, make_turn("a:0:0", 2, parent=0, prefix=4, messages_json="NEEDLE"))
    append(store, make_turn("a:1:0"), make_turn("b:0:0", 7))
    seal(store, "a:0:0", turns=3, rewards=[make_reward()])
    reward(store, make_reward("late", turn_index=2), trajectory_id="a:0:0")
    seal(store, "a:1:0", state=ABANDONED, rewards=[make_reward()])
    store.close()
    return tmp_path / "shard"


def found(directory) -> list[str]:
    return [str(one) for one in backup.check(directory, quiet)]


def tamper(directory, change) -> None:
    """Changes records behind the back of the rules, checksums included."""
    environment = Environment(directory, map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4)
    environment.write(change)
    environment.close()


def a(number: int = 0) -> bytes:
    return trajectory_key(parse_trajectory_id(f"a:{number}:0"))


def copied(table, key, to):
    """Puts the record under `key` under another one, too."""
    return lambda records: records.put(table, to, bytes(records.get(table, key)))


def reheaded(**changes):
    def change(records) -> None:
        header = decode_header(records.get(Table.TRAJECTORIES, a()))
        header = msgspec.structs.replace(header, **changes)
        records.put(Table.TRAJECTORIES, a(), encode_header(header))

    return change


def test_check_finds_no_damage_in_a_whole_shard(shard):
    """Writes through the store break no rule, and a check changes nothing."""
    before = (shard / "data.mdb").read_bytes()
    assert found(shard) == []
    assert (shard / "data.mdb").read_bytes() == before


def test_freed_groups_are_no_damage(open_store, tmp_path):
    """Neither half freed nor freed; a query, a count and a tail pass over them."""
    store = open_store(shard="s0")
    put_groups(store, make_group("a"))
    append(store, *(make_turn("a:0:0", number) for number in range(5)), make_turn("b:0:0"))
    seal(store, "a:0:0", turns=5, rewards=[make_reward()])
    seal(store, "b:0:0", rewards=[make_reward()])
    set_states(store, change("a", common_pb2.GROUP_STATE_TOMBSTONED))
    wanted = pool_pb2.TrajectoryFilter(min_reward=1.0)
    request = pool_pb2.QueryTrajectoriesRequest(filter=wanted)
    for most, freed_turns in ((3, 3), (100, 5)):
        commit(
            store,
            FreeGroups(task_ids=("a",), covered_step=0, max_records=most, now_unix_s=1e9),
        )
        assert store.stats().turns == 6 - freed_turns
        page = store.read(lambda records: query(records, request, shard="s0"))
        assert [(one.trajectory_id, one.freed) for one in page.trajectories] == [
            ("a:0:0", True),
            ("b:0:0", False),
        ]
        log = store.read(lambda records: read_log(records, wanted, shard="s0", after=0))
        assert [one.summary.trajectory_id for _, one in log.responses] == ["b:0:0"]
        store.close()
        assert found(tmp_path / "shard") == []
        store = open_store()


@pytest.mark.parametrize(
    ("tampering", "expected"),
    [
        (
            lambda records: records.delete(Table.TURNS, turn_key(a(), 1)),
            ["trajectories a:0:0: was closed with 3 turns", "turn 1 is missing"],
        ),
        (
            lambda records: [records.delete(Table.TURNS, turn_key(a(), n)) for n in range(3)],
            ["trajectories a:0:0: was closed with 3 turns: all gone"],
        ),
        (
            lambda records: records.delete(Table.TRAJECTORIES, a()),
            [
                "trajectories a:0:0: is not there, though 3 turns of it are",
                "rewards a:0:0 event late: its trajectory is not there",
                "rewards a:0:0 event outcome: its trajectory is not there",
                "changes 1: its trajectory is not there",
                "changes 2: its trajectory is not there",
            ],
        ),
        (
            copied(Table.TURNS, turn_key(a(), 0), turn_key(a(1), 5)),
            ["turns a:1:0 turn 5: holds turn 0 of a:0:0", "trajectories a:1:0: was closed with 1"],
        ),
        (reheaded(sampled_tokens=7), ["was closed with 3 turns, 7 sampled tokens"]),
        (reheaded(prompt_tokens=8), ["was closed with 3 turns, 6 sampled tokens, 8 prompt"]),
        (reheaded(closed_change=0), ["a:0:0: is closed, but not in the change log", "changes 1"]),
        (
            lambda records: records.put(
                Table.CHANGES,
                change_key(9),
                msgspec.msgpack.encode(TrajectoryChange(kind=1, trajectory=a(), logged_unix_s=1.0)),
            ),
            ["changes 9: is newer than the newest, 3", "changes 9: its trajectory knows nothing"],
        ),
        (
            lambda records: records.put(Table.CHANGES, change_key(1), b"\xff"),
            ["changes 1: cannot be decoded"],
        ),
        (
            lambda records: records.put(
                Table.REWARDS,
                reward_key(a(), "x"),
                make_reward("y", turn_index=3).SerializeToString(),
            ),
            ["event x: holds event 'y'", "event x: credits turn 3 of a trajectory of 3"],
        ),
        (
            lambda records: records.delete(Table.GROUPS, group_key("a")),
            ["group_states a: its group is not there", "queue a (purpose 1, index 3): its group"],
        ),
        (
            lambda records: records.delete(Table.STATES, group_key("b")),
            ["groups b: has no state"],
        ),
        (
            lambda records: records.delete(Table.QUEUE, queue_key(2, 4, "b")),
            ["groups b: is not in the queue"],
        ),
        (
            lambda records: records.put(Table.QUEUE, queue_key(1, 9, "a"), b""),
            ["queue a (purpose 1, index 9): its group has another place"],
        ),
        (
            lambda records: records.put(Table.TURNS, turn_key(a(), 1), b"short"),
            ["turns a:0:0 turn 1: "],
        ),
    ],
)
def test_contradicting_records_are_named(shard, tampering, expected):
    """Each broken rule names its record, in the order of the tables."""
    tamper(shard, tampering)
    lines = found(shard)
    for text in expected:
        assert any(text in line for line in lines), lines
    assert len(lines) >= len(expected)


def test_header_without_prompt_tokens_is_whole(shard):
    """A pool of an earlier release did not count them."""
    tamper(shard, reheaded(prompt_tokens=0))
    assert found(shard) == []


def test_flipped_bit_is_reported_and_hides_no_other_damage(shard):
    """One record's checksum, and the consequences of its loss; the rest is checked too."""
    tamper(shard, lambda records: records.delete(Table.QUEUE, queue_key(2, 4, "b")))
    damage(shard, b"NEEDLE")
    lines = found(shard)
    assert lines[0] == "turns a:0:0 turn 2: the checksum does not match"
    assert lines[-1] == "groups b: is not in the queue"


def test_backup_of_a_live_shard_is_whole(open_store, tmp_path):
    """A backup by another process while the shard is open and written to is whole, and is served
    like the shard itself; a second one needs another name."""
    store = open_store(shard="s0")
    for number in range(20):
        append(store, make_turn(f"t:{number}:0"))
        seal(store, f"t:{number}:0")
    command = [sys.executable, "-m", "services.pool.maintenance", "backup"]
    target = tmp_path / "copies" / "monday"
    first = subprocess.run([*command, tmp_path / "shard", target], capture_output=True, text=True)
    assert (first.returncode, first.stderr) == (0, "")
    append(store, make_turn("later:0:0"))
    second = subprocess.run([*command, tmp_path / "shard", target], capture_output=True, text=True)
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1 and "is there already and not empty" in second.stderr
    expected = [fetch(store, f"t:{number}:0") for number in range(20)]
    assert restore(target, tmp_path / "restored", quiet) == []
    store.close()
    (tmp_path / "shard").rename(tmp_path / "old")
    (tmp_path / "restored").rename(tmp_path / "shard")
    store = open_store()
    assert store.shard == "s0"
    assert [fetch(store, f"t:{number}:0") for number in range(20)] == expected
    append(store, make_turn("later:0:0"))


def test_shard_that_outgrows_the_map_during_a_backup_is_copied(open_store, tmp_path, monkeypatch):
    """Between the moment it is opened and the moment it is copied."""
    store = open_store(map_bytes=MIB)
    append(store, make_turn("t:0:0"))
    directory = tmp_path / "shard"
    copy = backup._copy

    def grow_then_copy(*arguments) -> None:
        subprocess.run([sys.executable, "-c", GROW, directory], check=True)
        copy(*arguments)

    store.close()
    monkeypatch.setattr(backup, "_copy", grow_then_copy)
    backup.backup(directory, tmp_path / "copy", quiet)
    assert (tmp_path / "copy" / "data.mdb").stat().st_size > 8 * MIB


GROW = """
import sys
from pathlib import Path
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.records import Table
opened = Environment(Path(sys.argv[1]), map_bytes=1 << 20, map_max_bytes=1 << 30, max_readers=1)
opened.write(lambda records: records.put(Table.META, b"large", bytes(1 << 23)))
opened.close()
"""


def test_damaged_backup_is_not_restored(shard, tmp_path):
    """The damage is reported, and the target stays empty."""
    backup.backup(shard, tmp_path / "copy", quiet)
    damage(tmp_path / "copy", b"NEEDLE")
    (first, *_) = restore(tmp_path / "copy", tmp_path / "restored", quiet)
    assert str(first) == "turns a:0:0 turn 2: the checksum does not match"
    assert not (tmp_path / "restored").exists()
    assert not list(tmp_path.glob(".*"))


def test_backup_and_restore_overwrite_no_directory(shard, tmp_path):
    """A directory with content is refused."""
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    for make in (backup.backup, restore):
        with pytest.raises(FailedPrecondition, match="taken is there already and not empty"):
            make(shard, taken, quiet)
    assert (taken / "file").read_text() == "mine"


def test_compaction_frees_room_and_changes_no_record(open_store, tmp_path):
    """Deleted records take no room afterwards; all others read as before."""
    store = open_store(shard="s0")
    append(store, *(make_turn("t:0:0", n, messages_json="x" * 50_000) for n in range(40)))
    append(store, make_turn("u:0:0"))
    expected = fetch(store, "u:0:0")
    store.close()
    directory = tmp_path / "shard"
    turns = [turn_key(trajectory_key(parse_trajectory_id("t:0:0")), n) for n in range(40)]
    tamper(directory, lambda records: [records.delete(Table.TURNS, key) for key in turns])
    before, after = backup.compact(directory, quiet)
    assert after < before / 4
    assert sorted(path.name for path in directory.iterdir()) == ["data.mdb", "replica"]
    assert found(directory) == []
    store = open_store()
    assert fetch(store, "u:0:0") == expected
    append(store, make_turn("u:0:0", 1))


def test_shard_in_use_is_not_compacted(open_store, tmp_path):
    """The error says that it is in use; an earlier copy does not block."""
    store = open_store()
    with pytest.raises(ConfigError, match="in use by another pool instance"):
        backup.compact(tmp_path / "shard", quiet)
    store.close()
    (tmp_path / "shard" / ".compacted.unfinished").mkdir()
    backup.compact(tmp_path / "shard", quiet)


def test_directory_that_is_no_shard_is_named_in_one_line(shard, tmp_path):
    """A directory above a shard names it; a file that is no shard is DATA_LOSS; an old schema gives
    the way to migrate it."""
    with pytest.raises(ConfigError, match=r"no pool shard.*there are shards in .*/shard$"):
        found(tmp_path)
    garbage = tmp_path / "garbage"
    garbage.mkdir()
    (garbage / "data.mdb").write_bytes(b"\x17" * 8192)
    with pytest.raises(DataLoss, match="no pool shard that can be read"):
        found(garbage)
    tamper(shard, lambda records: records.put(Table.META, b"schema_version", b"1"))
    with pytest.raises(ConfigError, match=r"schema version 1, .* start a pool instance on it once"):
        found(shard)


def test_check_command_lists_damage_by_key_and_exits_with_1(shard):
    """One line for each damage on stdout; their number on stderr."""
    command = [sys.executable, "-m", "services.pool.maintenance", "check", shard]
    whole = subprocess.run(command, capture_output=True, text=True)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert whole.stdout == f"{shard} is whole\n"
    tamper(shard, lambda records: records.delete(Table.STATES, group_key("b")))
    damaged = subprocess.run(command, capture_output=True, text=True)
    assert damaged.returncode == 1
    assert damaged.stdout == "groups b: has no state\n"
    assert damaged.stderr == "forge: 1 records are damaged\n"
