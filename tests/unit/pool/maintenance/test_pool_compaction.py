"""A shard's file rewritten while the shard is written to and read."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from pathlib import Path

import pytest

from forge.core.errors import DataLoss, FailedPrecondition, ResourceExhausted
from forge.v1 import common_pb2
from services.pool.data.commands import FreeGroups
from services.pool.maintenance import compaction
from services.pool.maintenance.backup import backup
from services.pool.maintenance.compaction import Compactor
from services.pool.storage.environment.file_locks import data_kept
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_turn
from tests.support.pool.store import append, change, commit, fetch, put_groups, seal, set_states

MIB = 1 << 20


async def compact(store: PoolStore, compactor: Compactor | None = None) -> tuple[int, int]:
    """Bytes before and after."""
    async with aclosing(
        (compactor or Compactor(store.environment, reserve_bytes=store.disk_reserve_bytes)).run("")
    ) as responses:
        async for last in responses:
            assert last.copied_bytes <= last.total_bytes
    return last.before_bytes, last.after_bytes


def fill(store: PoolStore) -> None:
    """A large group that has been freed, and a small one that has not."""
    put_groups(store, make_group("big"), make_group("small", 1))
    append(store, *(make_turn("big:0:0", n, messages_json="x" * 50_000) for n in range(40)))
    seal(store, "big:0:0", turns=40)
    append(store, make_turn("small:0:0"))
    set_states(store, change("big", common_pb2.GROUP_STATE_TOMBSTONED))
    free = FreeGroups(task_ids=("big",), covered_step=0, max_records=100, now_unix_s=1e9)
    commit(store, free)


def everything(store: PoolStore) -> dict[Table, list[tuple[bytes, bytes]]]:
    return store.read(
        lambda records: {table: list(records.scan_checksummed(table)) for table in Table}
    )


def left_over(directory: Path) -> list[str]:
    kept = ("data.mdb", "lock.mdb", "replica")
    return sorted(path.name for path in directory.iterdir() if path.name not in kept)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "shard"


async def test_compaction_of_an_open_shard_changes_no_record(store, directory):
    """The file shrinks, its records are equal bit by bit, and writes continue, also after a
    restart."""
    fill(store)
    before = everything(store)
    before_bytes, after_bytes = await compact(store)
    assert (directory / "data.mdb").stat().st_size == after_bytes < before_bytes / 4
    assert everything(store) == before
    assert store.environment.used_bytes <= after_bytes
    append(store, make_turn("small:0:0", 1, prefix=5))
    assert left_over(directory) == []
    store.close()
    assert list(backup.check(directory, lambda done, total: None)) == []


async def test_changes_during_a_compaction_are_in_the_new_file(
    store, open_store, directory, monkeypatch
):
    """Records written, replaced and deleted between copy and exchange, also repeatedly; the journal
    of a replica among them."""
    store.count_commits(lambda position, changes: None)
    fill(store)
    for number in range(600):
        append(store, make_turn(f"t:{number}:0"))
    copy, bring_in = Compactor._copy, Compactor._bring_in
    rounds: list[int] = []

    async def copy_then_write(self: Compactor) -> None:
        await copy(self)
        for number in range(600):
            seal(store, f"t:{number}:0")
        store.write(lambda records: records.delete(Table.QUEUE, next(records.scan(Table.QUEUE))[0]))

    def write_then_bring_in(self: Compactor, target, notes) -> int:
        rounds.append(len(notes.keys))
        if len(rounds) == 1:
            append(store, make_turn("late:0:0"))
            seal(store, "late:0:0")
        return bring_in(self, target, notes)

    monkeypatch.setattr(Compactor, "_copy", copy_then_write)
    monkeypatch.setattr(Compactor, "_bring_in", write_then_bring_in)
    await compact(store)
    assert rounds[0] > 1200 and 2 <= rounds[1] < 20 and rounds[2:] == [0]
    after = everything(store)
    assert fetch(store, "late:0:0").turns == [make_turn("late:0:0")]
    assert len(after[Table.QUEUE]) == 1
    assert everything(open_store()) == after


async def test_writers_and_readers_continue_during_compaction(open_store, directory):
    """Threads that append and read notice nothing, over several compactions with a growing map."""
    store = open_store(map_bytes=MIB)
    fill(store)
    done = threading.Event()
    failures: list[BaseException] = []
    written = 0

    def write() -> None:
        nonlocal written
        while not (written and done.is_set()):
            append(store, make_turn(f"w:{written}:0", messages_json="y" * 2000))
            written += 1

    def read() -> None:
        while not done.is_set():
            assert fetch(store, "small:0:0").turns == [make_turn("small:0:0")]
            store.stats()

    def guarded(loop) -> None:
        try:
            loop()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=[loop]) for loop in (write, read, read)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            await compact(store)
    finally:
        done.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert failures == []
    for number in range(written):
        assert fetch(store, f"w:{number}:0").turns[0].messages_json == "y" * 2000
    store.close()
    assert list(backup.check(directory, lambda done, total: None)) == []


async def refused(store: PoolStore, error: type[Exception], match: str) -> None:
    """The compaction fails with that error, the shard is as it was, and can be compacted next."""
    before = everything(store)
    with pytest.raises(error, match=match):
        await compact(store)
    assert everything(store) == before
    append(store, make_turn("after:0:0"))


async def test_compaction_ends_after_too_many_changes(store, monkeypatch):
    """A shard with too many writes refuses it, and serves on."""
    fill(store)
    monkeypatch.setattr(compaction, "NOTED_BYTES", 1000)
    copy = Compactor._copy

    async def copy_then_write(self: Compactor) -> None:
        await copy(self)
        store.write(lambda records: [records.put(Table.META, b"%d" % n, b"") for n in range(999)])
        store.write(lambda records: [records.delete(Table.META, b"%d" % n) for n in range(999)])

    monkeypatch.setattr(Compactor, "_copy", copy_then_write)
    await refused(
        store, ResourceExhausted, "more than 1000 bytes of keys were changed during the copy"
    )


async def test_compaction_ends_if_changes_arrive_too_fast(store, monkeypatch):
    """After some rounds."""
    fill(store)
    monkeypatch.setattr(compaction, "FEW_RECORDS", -1)
    await refused(store, ResourceExhausted, "writes arrive faster than compaction copies them")


async def test_compaction_ends_if_a_table_is_cleared(store, monkeypatch):
    """The clearing is not noted: the copy is deleted."""
    fill(store)
    copy = Compactor._copy

    async def copy_then_clear(self: Compactor) -> None:
        await copy(self)
        store.write(lambda records: records.clear(Table.JOURNAL))

    monkeypatch.setattr(Compactor, "_copy", copy_then_clear)
    await refused(store, ResourceExhausted, "the table journal was cleared during the copy")


async def test_compaction_deletes_a_copy_without_all_records(store, monkeypatch):
    """Records are counted before the exchange."""
    fill(store)
    copy = Compactor._copy

    async def copy_and_lose(self: Compactor) -> None:
        await copy(self)
        lossy = Environment(
            self._copy_directory, map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=1
        )
        lossy.write(lambda records: records.clear(Table.QUEUE))
        lossy.close()

    monkeypatch.setattr(Compactor, "_copy", copy_and_lose)
    await refused(store, DataLoss, "the copy has .*'queue': 0")


async def test_compaction_without_room_for_the_copy_is_refused(open_store):
    """Before a record is copied."""
    store = open_store(disk_reserve_bytes=1 << 60)
    with pytest.raises(ResourceExhausted, match=r"bytes free on its disk; a copy .* takes"):
        await compact(store)


async def test_compaction_reports_the_error_of_the_copying_process(store, directory):
    """The last line of its output."""
    fill(store)
    (directory / "compacted").touch()
    with pytest.raises(ResourceExhausted, match=r"could not be made: .*compacted is there already"):
        await compact(store)


async def test_compaction_is_refused_while_the_file_is_read(store, directory):
    """A check or backup keeps the file; afterwards it can be compacted."""
    fill(store)
    with data_kept(directory):
        await refused(store, FailedPrecondition, "is being read by another process")
    await compact(store)


async def test_second_compaction_is_refused(store, tmp_path):
    """Also one that names another directory."""
    fill(store)
    compactor = Compactor(store.environment, reserve_bytes=store.disk_reserve_bytes)
    async with aclosing(compactor.run("")) as responses:
        await anext(responses)
        with pytest.raises(FailedPrecondition, match="is being compacted already"):
            await anext(compactor.run(""))
    with pytest.raises(FailedPrecondition, match=r"has it in .*shard, not in /elsewhere"):
        await anext(compactor.run("/elsewhere"))
    assert (await compact(store, compactor))[1] > 0


async def test_cancelled_compaction_leaves_no_copy(store, directory):
    """And the file is not exchanged."""
    fill(store)
    inode = (directory / "data.mdb").stat().st_ino
    async with aclosing(
        Compactor(store.environment, reserve_bytes=store.disk_reserve_bytes).run("")
    ) as responses:
        await anext(responses)
    assert (directory / "data.mdb").stat().st_ino == inode
    assert left_over(directory) == []


def test_copy_of_a_killed_compaction_is_removed(open_store, directory):
    """At the next start."""
    open_store()
    for name in ("compacted", ".compacted.unfinished"):
        (directory / name).mkdir()
        (directory / name / "data.mdb").touch()
    open_store()
    assert left_over(directory) == []
