"""Backups from a timer: full ones and increments, old chains, and kill -9 at any moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from forge.core.errors import FailedPrecondition
from forge.v1 import pool_pb2
from services.pool.maintenance.__main__ import main
from services.pool.maintenance.backup import scheduled_backups
from services.pool.maintenance.backup.backup import HalfCopy, backup
from services.pool.maintenance.backup.backup_erasure import erase_in
from services.pool.maintenance.backup.increments import is_increment
from services.pool.maintenance.backup.restore import restore
from services.pool.maintenance.backup.scheduled_backups import (
    Scheduled,
    back_up_scheduled,
    backups_in,
    newest_of_each_shard,
)
from services.pool.storage.journal import ReplicaState, _keep
from services.pool.store import PoolStore
from tests.support.pool.records import damage, make_group, make_turn
from tests.support.pool.store import append, put_groups, seal

DAY_S = 86_400.0
Open = Callable[..., PoolStore]


def quiet(done: int, total: int) -> None:
    """No progress."""


@pytest.fixture
def work(open_store: Open) -> Callable[[], str]:
    """Each call stores one more group with a trajectory, and closes the shard; its task id."""
    numbers = itertools.count()

    def once() -> str:
        number = next(numbers)
        store = open_store(shard="s0")
        put_groups(store, make_group(f"t{number}", number))
        append(store, make_turn(f"t{number}:0:0", parent=-1, messages_json=f"text {number}"))
        seal(store, f"t{number}:0:0", turns=1)
        store.close()
        return f"t{number}"

    return once


def scheduled(tmp_path: Path, day: float, *, keep: int = 2) -> Scheduled:
    return back_up_scheduled(
        tmp_path / "shard",
        tmp_path / "backups",
        quiet,
        full_every_s=3 * DAY_S,
        keep=keep,
        now_unix_s=day * DAY_S,
    )


def tasks_in(made: Path, tmp_path: Path) -> list[str]:
    """The groups that a backup restores."""
    target = tmp_path / f"restored-{len(list(tmp_path.iterdir()))}"
    assert restore(made, target, quiet) == []
    store = PoolStore(target)
    request = pool_pb2.LookUpGroupsRequest(task_ids=[f"t{number}" for number in range(20)])
    found = [group.task.task_id for group in store.look_up(request).groups]
    store.close()
    return found


@pytest.fixture(autouse=True)
def taken_on_the_day(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Snapshots are of the day that the test names."""

    def on(day: float) -> None:
        for module in ("backup", "increments"):
            monkeypatch.setattr(
                f"services.pool.maintenance.backup.{module}.time.time", lambda: day * DAY_S
            )

    return on


def test_full_backups_are_followed_by_increments(
    work: Callable[[], str], tmp_path: Path, taken_on_the_day: Callable[[float], None]
) -> None:
    """A full one every third day, two chains are kept, and each kept backup restores its day."""
    expected: dict[Path, list[str]] = {}
    tasks: list[str] = []
    for day in range(8):
        taken_on_the_day(day)
        tasks.append(work())
        made = scheduled(tmp_path, day)
        assert bool(made.full_because) == (day % 3 == 0), made
        expected[made.made] = list(tasks)
    kept = [one.directory for one in backups_in(tmp_path / "backups")]
    assert kept == list(expected)[3:]
    for directory in kept:
        assert tasks_in(directory, tmp_path) == expected[directory]
    assert newest_of_each_shard(tmp_path / "backups") == kept[-1:]


def test_impossible_increment_becomes_a_full_backup(
    work: Callable[[], str], tmp_path: Path, taken_on_the_day: Callable[[float], None]
) -> None:
    """After an erasure in the backup; its increments, which may have the erased records, go."""
    work()
    taken_on_the_day(0)
    full = scheduled(tmp_path, 0).made
    work()
    taken_on_the_day(1)
    increment = scheduled(tmp_path, 1).made
    erase_in(full, pool_pb2.EraseTrajectoriesRequest(task_ids=["t0"]), quiet)
    taken_on_the_day(2)
    made = scheduled(tmp_path, 2)
    assert "erased in" in made.full_because
    assert made.deleted == [increment]
    assert tasks_in(made.made, tmp_path) == ["t0", "t1"]


def test_damaged_shard_deletes_no_backup(
    work: Callable[[], str], tmp_path: Path, taken_on_the_day: Callable[[float], None]
) -> None:
    """The full backup of it is reported."""
    for day in (0, 3):
        taken_on_the_day(day)
        work()
        scheduled(tmp_path, day)
    damage(tmp_path / "shard", b"text 0")
    taken_on_the_day(6)
    made = scheduled(tmp_path, 6, keep=1)
    assert made.damage and not made.deleted
    assert len(backups_in(tmp_path / "backups")) == 3


class Interrupted(Exception):
    """Stands for kill -9: nothing handles it."""


def test_interrupted_deletion_leaves_chains_that_restore(
    work: Callable[[], str],
    tmp_path: Path,
    taken_on_the_day: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between any two of its steps; the next run deletes the rest."""
    for day in range(6):
        taken_on_the_day(day)
        work()
        scheduled(tmp_path, day)
    left = [0]
    remove = scheduled_backups.delete

    def interrupted(path: Path) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Interrupted
        remove(path)

    monkeypatch.setattr(scheduled_backups, "delete", interrupted)
    for number in (1, 2):
        left[0] = number
        taken_on_the_day(5 + 3 * number)
        with pytest.raises(Interrupted):
            scheduled(tmp_path, 5 + 3 * number, keep=1)
        for one in backups_in(tmp_path / "backups"):
            assert not is_increment(one.directory) or tasks_in(one.directory, tmp_path)
    left[0] = 0
    taken_on_the_day(14)
    made = scheduled(tmp_path, 14, keep=1)
    assert [one.directory for one in backups_in(tmp_path / "backups")] == [made.made]
    assert not list((tmp_path / "backups").glob("*unfinished*"))


def test_two_runs_at_once_are_one(work: Callable[[], str], tmp_path: Path) -> None:
    """The second is refused in one line."""
    work()
    with (
        scheduled_backups._locked(_made(tmp_path / "backups"), "s0"),
        pytest.raises(FailedPrecondition, match="another process backs shard s0 up"),
    ):
        scheduled(tmp_path, 0)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_replica_that_catches_up_is_not_backed_up(open_store: Open, tmp_path: Path) -> None:
    """Its records are of no single moment."""
    store = open_store(shard="s0")
    store.environment.write(lambda records: _keep(records, ReplicaState(copying=True)))
    store.close()
    with pytest.raises(HalfCopy, match="of no single moment"):
        backup(tmp_path / "shard", tmp_path / "copy", quiet)
    assert not (tmp_path / "copy").exists()


def test_command_says_what_it_did(
    work: Callable[[], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its timer's journal shows it; the watermark takes the folder."""
    work()
    shard, backups = str(tmp_path / "shard"), str(tmp_path / "backups")
    assert main(["back-up-scheduled", shard, backups, "--full-every-s=60", "--keep=2"]) == 0
    said = capsys.readouterr().out
    assert "full, because it is the first" in said and "is whole" in said
    assert main(["watermark", backups]) == 0
    said = capsys.readouterr().out
    assert "shard s0" in said and said.endswith("step 0\n")
