"""Incremental backups: a restored one is its snapshot, and chains that do not fit are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgspec
import pytest

from forge.core.errors import ConfigError, DataLoss, FailedPrecondition, InvalidArgument
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import FreeGroups
from services.pool.maintenance.backup import increments
from services.pool.maintenance.backup.backup import backup
from services.pool.maintenance.backup.backup_erasure import erase_in
from services.pool.maintenance.backup.increments import CHANGES, back_up_changes
from services.pool.maintenance.backup.manifests import (
    BackupManifest,
    common_step,
    read_manifest,
    write_manifest,
)
from services.pool.maintenance.backup.restore import restore
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    append,
    as_version_4,
    change,
    commit,
    put_groups,
    records_of,
    reward,
    seal,
    set_states,
)

MIB = 1 << 20
TRAINED = common_pb2.GROUP_STATE_TRAINED
Open = Callable[..., PoolStore]


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= max(total, done)


def work(open_store: Open, step: int) -> None:
    """A round in a process of its own: LMDB opens a file once in a process."""
    store = open_store(shard="s0")
    run_round(store, random.Random(step), step)
    store.close()


def run_round(store: PoolStore, rng: random.Random, step: int) -> None:
    """A round of a run: new groups, turns, seals, late rewards, states, freed groups."""
    task = f"t{step}"
    put_groups(store, make_group(task, step))
    for rollout in range(2):
        name = f"{task}:{rollout}:0"
        for index in range(rng.randrange(1, 4)):
            append(
                store, make_turn(name, index, parent=-1, messages_json="x" * rng.randrange(3000))
            )
        seal(store, name, turns=index + 1, rewards=[make_reward(value=rng.random())])
    if step > 2:
        old = f"t{rng.randrange(step - 1)}"
        set_states(
            store,
            change(f"t{step - 1}", TRAINED, batch_id=f"b{step}", step=step),
            now_unix_s=100.0 + step,
        )
        reward(store, make_reward(f"late{step}"), trajectory_id=f"t{step}:0:0")
        commit(store, FreeGroups(task_ids=(old,), covered_step=99, max_records=99, now_unix_s=1e3))


def test_each_backup_of_a_chain_restores_its_snapshot(open_store: Open, tmp_path: Path) -> None:
    """Record for record, with new, changed and deleted ones; and it passes the check."""
    snapshots: list[dict[Table, list[tuple[bytes, bytes]]]] = []
    names: list[Path] = []
    for step in range(8):
        work(open_store, step)
        name = tmp_path / f"s0-{step}"
        if step == 0:
            backup(tmp_path / "shard", name, quiet)
        else:
            made = back_up_changes(tmp_path / "shard", names[-1], name, quiet)
            assert made.changed > 0
        names.append(name)
        snapshots.append(records_of(tmp_path / "shard"))
    assert sum(read_manifest(name).deleted for name in names) > 0
    for number in (0, 4, 7):
        target = tmp_path / f"restored-{number}"
        assert restore(names[number], target, quiet) == []
        assert records_of(target) == snapshots[number]


def test_increment_has_only_the_changes(open_store: Open, tmp_path: Path) -> None:
    """Nothing happened: no record; one late reward: a few."""
    for step in range(3):
        work(open_store, step)
    backup(tmp_path / "shard", tmp_path / "full", quiet)
    none = back_up_changes(tmp_path / "shard", tmp_path / "full", tmp_path / "none", quiet)
    assert (none.changed, none.deleted) == (0, 0)
    store = open_store(shard="s0")
    reward(store, make_reward("later"), trajectory_id="t2:1:0")
    store.close()
    few = back_up_changes(tmp_path / "shard", tmp_path / "none", tmp_path / "few", quiet)
    assert 0 < few.changed < 10


def chain(open_store: Open, tmp_path: Path) -> tuple[Path, Path]:
    """A full backup and an increment of it."""
    work(open_store, 0)
    backup(tmp_path / "shard", tmp_path / "full", quiet)
    work(open_store, 1)
    back_up_changes(tmp_path / "shard", tmp_path / "full", tmp_path / "more", quiet)
    return tmp_path / "full", tmp_path / "more"


def restored(backup_: Path, tmp_path: Path) -> None:
    """Restores, and looks that a refusal leaves nothing."""
    try:
        restore(backup_, tmp_path / "restored", quiet)
    finally:
        assert not (tmp_path / "restored").exists()
        assert not list(tmp_path.glob("*unfinished*"))


def test_damaged_increment_is_refused(open_store: Open, tmp_path: Path) -> None:
    """A flipped bit anywhere in its file."""
    _, more = chain(open_store, tmp_path)
    data = bytearray((more / CHANGES).read_bytes())
    data[len(data) // 2] ^= 1
    (more / CHANGES).write_bytes(data)
    with pytest.raises(DataLoss, match="digest does not match"):
        restored(more, tmp_path)


def test_increment_needs_its_base(open_store: Open, tmp_path: Path) -> None:
    """Under the name it had, beside it."""
    full, more = chain(open_store, tmp_path)
    full.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="follows the backup full, which is not beside it"):
        restored(more, tmp_path)


def test_increment_of_a_changed_base_is_refused(open_store: Open, tmp_path: Path) -> None:
    """Erasing in the base would be undone in part, so the increment has to go, too."""
    full, more = chain(open_store, tmp_path)
    erase_in(full, pool_pb2.EraseTrajectoriesRequest(task_ids=["t0"]), quiet)
    with pytest.raises(FailedPrecondition, match="which was erased in or replaced"):
        restored(more, tmp_path)
    assert restore(full, tmp_path / "of-base", quiet) == []


def test_base_of_another_store_is_refused(open_store: Open, tmp_path: Path) -> None:
    """Of another lineage, elsewhere, or without a manifest."""
    full, _ = chain(open_store, tmp_path)
    other = tmp_path / "other"
    Environment(other, map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4).close()
    for source, base, target, said in (
        (other, full, tmp_path / "x", "is a backup of shard 's0'"),
        (tmp_path / "shard", full, tmp_path / "deep" / "x", "must be beside"),
        (tmp_path / "shard", other, tmp_path / "x", r"has no backup\.json"),
    ):
        with pytest.raises((FailedPrecondition, ConfigError), match=said):
            back_up_changes(source, base, target, quiet)
        assert not target.exists()


def test_chain_has_a_longest_length(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a full backup is due; the longest one is restored."""
    _, more = chain(open_store, tmp_path)
    monkeypatch.setattr(increments, "MAX_CHAIN", 2)
    back_up_changes(tmp_path / "shard", more, tmp_path / "last", quiet)
    assert restore(tmp_path / "last", tmp_path / "restored", quiet) == []
    with pytest.raises(FailedPrecondition, match="make a full backup"):
        back_up_changes(tmp_path / "shard", tmp_path / "last", tmp_path / "more2", quiet)


def test_interrupted_increment_leaves_no_directory(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets its name when it is complete; the same command succeeds later."""
    full, _ = chain(open_store, tmp_path)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(increments, "write_manifest", fails)
        back_up_changes(tmp_path / "shard", full, tmp_path / "late", quiet)
    assert not (tmp_path / "late").exists()
    back_up_changes(tmp_path / "shard", full, tmp_path / "late", quiet)
    assert restore(tmp_path / "late", tmp_path / "restored", quiet) == []


def test_backup_of_an_earlier_schema_is_restored(open_store: Open, tmp_path: Path) -> None:
    """Brought to the present schema, then verified."""
    full, _ = chain(open_store, tmp_path)
    old = Environment(full, map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4)
    old.write(as_version_4)
    old.close()
    assert restore(full, tmp_path / "restored", quiet) == []
    assert records_of(tmp_path / "restored")[Table.LABELS]


def without_labels(path: Path, *, subdir: bool) -> None:
    """Drops a table that an earlier schema did not have."""
    with lmdb.open(str(path), subdir=subdir, max_dbs=20, map_size=64 * MIB) as environment:
        table = environment.open_db(b"labels", create=False)
        with environment.begin(write=True) as transaction:
            transaction.drop(table)


def test_chain_of_an_earlier_schema_is_restored(open_store: Open, tmp_path: Path) -> None:
    """A table that neither backup has is made by the migration."""
    full, more = chain(open_store, tmp_path)
    old = Environment(full, map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4)
    old.write(as_version_4)
    old.close()
    without_labels(full, subdir=True)
    without_labels(more / CHANGES, subdir=False)
    digest = increments._digest(more / CHANGES)
    write_manifest(more, msgspec.structs.replace(read_manifest(more), digest=digest))
    assert restore(more, tmp_path / "restored", quiet) == []
    assert records_of(tmp_path / "restored")[Table.LABELS]


def manifest(shard: str, taken_unix_s: float, *steps: tuple[int, float]) -> BackupManifest:
    return BackupManifest(
        backup_id=shard, shard=shard, lineage="x", taken_unix_s=taken_unix_s, steps=steps
    )


def test_common_step_is_complete_in_every_backup() -> None:
    """A step counts when a later one began before all backups; a shard without groups of a step
    does not matter; clocks may differ by some seconds."""
    early, late = manifest("a", 100.0, (7, 90.0), (5, 70.0)), manifest("b", 200.0, (9, 150.0))
    assert common_step([early]) == 6
    assert common_step([early, late]) == 6
    assert common_step([early, manifest("b", 200.0, (9, 150.0), (8, 94.9))]) == 7
    assert common_step([early, manifest("b", 200.0, (9, 150.0), (8, 95.1))]) == 6
    assert common_step([manifest("a", 100.0)]) == 0
    with pytest.raises(InvalidArgument, match="several backups of one shard"):
        common_step([early, early])


def test_manifest_names_the_newest_steps(open_store: Open, tmp_path: Path) -> None:
    """Latest first, each with the time of its last group."""
    for step in range(6):
        work(open_store, step)
    backup(tmp_path / "shard", tmp_path / "full", quiet)
    assert read_manifest(tmp_path / "full").steps == ((5, 105.0), (4, 104.0), (3, 103.0))
