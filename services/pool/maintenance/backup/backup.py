"""Copies of a shard's files: checked, made, compacted.

Owns the tools that run outside the serving process. A copy is of one snapshot, without free pages.
Another process on the same host makes it: the service spends no thread and no memory, its map may
grow meanwhile, and access to the files is the only credential. No file has its final name before it
is complete.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from forge.core.errors import (
    ConfigError,
    DataLoss,
    FailedPrecondition,
    ForgeError,
    ResourceExhausted,
    Unavailable,
)
from forge.runtime.files.sync import sync
from services.pool.maintenance.backup.manifests import manifest_of, write_manifest
from services.pool.maintenance.integrity import Checker, Damage
from services.pool.storage.environment.file_locks import (
    DATA,
    LOCK,
    compacted,
    data_kept,
    data_locked,
    drop_compacted,
    exchange_data,
    file_bytes,
    lock_directory,
    set_hand_over_mark,
    unfinished,
)
from services.pool.storage.environment.migrations import SCHEMA_VERSION, stored_version
from services.pool.storage.journal import replica_state
from services.pool.storage.keys import SHARD_KEY
from services.pool.storage.records import Payload, Records
from services.pool.storage.tables import Table

PROGRESS_S = 0.2
COPY_BYTES = 1 << 22
AHEAD_BYTES = 1 << 36
_TABLES = [table.value.encode() for table in Table]

Progress = Callable[[int, int], None]
"""Receives the work done and the total."""


class HalfCopy(Unavailable):
    """The shard is a replica that catches up."""


def check(directory: Path, progress: Progress) -> Iterator[Damage]:
    """All damage of the shard in `directory`, served or not.

    Raises `ConfigError` if there is no shard, or one of another schema version; `DataLoss` if
    nothing can be read.
    """
    with snapshot(directory) as (transaction, databases):
        version = stored_version(Records(transaction, databases))
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{directory} has pool schema version {version}, but this program checks version "
                f"{SCHEMA_VERSION}: "
                + (
                    "start a pool instance on it once to migrate it"
                    if version < SCHEMA_VERSION
                    else "use the version that wrote it"
                )
            )
        total = sum(transaction.stat(database)["entries"] for database in databases.values())
        looked_at = 0

        def count() -> None:
            nonlocal looked_at
            looked_at += 1
            if looked_at % 1000 == 0 or looked_at == total:
                progress(looked_at, total)

        yield from Checker(transaction, databases, progress=count).damage()


@contextmanager
def snapshot(directory: Path) -> Iterator[tuple[Any, dict[Table, Any]]]:
    """Transaction and tables of the shard in `directory`, read-only. Raises as `check` does."""
    with opened_shard(directory) as environment:
        try:
            databases = {
                table: environment.open_db(table.value.encode(), create=False) for table in Table
            }
            with environment.begin(buffers=True) as transaction:
                yield transaction, databases
        except lmdb.NotFoundError:
            raise ConfigError(
                f"{directory} is not a pool shard of schema version {SCHEMA_VERSION}: it lacks a "
                "table; start a pool instance on it once to migrate it"
            ) from None
        except (lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
            raise DataLoss(f"{directory} is damaged: {error}") from None


@contextmanager
def opened_shard(directory: Path) -> Iterator[lmdb.Environment]:
    """Read-only, beside the serving process. Raises `ConfigError` or `DataLoss`."""
    _require_shard(directory)
    with data_kept(directory):
        environment = _open(directory)
        try:
            yield environment
        finally:
            environment.close()


def _require_shard(directory: Path) -> None:
    if not directory.exists():
        raise ConfigError(f"there is no directory {directory}")
    if not (directory / DATA).exists():
        shards = sorted(str(path.parent) for path in directory.glob(f"**/{DATA}"))
        hint = f"; there are shards in {', '.join(shards)}" if shards else ""
        raise ConfigError(f"{directory} holds no pool shard: there is no {DATA}{hint}")


def _open(directory: Path) -> lmdb.Environment:
    # The service may let the file grow before the snapshot is taken.
    map_bytes = file_bytes(directory / DATA) + AHEAD_BYTES
    try:
        environment = lmdb.open(
            str(directory), readonly=True, max_dbs=len(Table), map_size=map_bytes
        )
        environment.reader_check()
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
        raise DataLoss(f"{directory} holds no pool shard that can be read: {error}") from None
    except lmdb.ReadersFullError:
        raise ResourceExhausted(
            f"too many processes read {directory} already", retry_after_s=1.0
        ) from None
    except lmdb.Error as error:
        raise ConfigError(f"{directory} cannot be opened: {error}") from None
    return environment


def backup(source: Path, target: Path, progress: Progress, *, purge: bool = False) -> int:
    """Copies the shard in `source`, live or not, into a new directory; the bytes of the copy.
    `purge`: without any byte of deleted records.

    Raises `FailedPrecondition` if `target` exists, `ConfigError` if it cannot be written,
    `ResourceExhausted` if it does not fit, `HalfCopy` for a replica that catches up.
    """
    taken_unix_s = time.time()
    with opened_shard(source) as environment, new_directory(target) as copy:
        (_copy_records if purge else _copy)(environment, copy, progress)
        # Without a manifest for a shard that is damaged or of another schema: no increment follows.
        try:
            with snapshot(copy) as opened:
                records = Records(*opened)
                refuse_half_copy(records)
                write_manifest(copy, manifest_of(records, taken_unix_s=taken_unix_s))
        except HalfCopy:
            raise
        except (ForgeError, lmdb.Error):
            pass
        (copy / LOCK).unlink(missing_ok=True)
        return (copy / DATA).stat().st_size


def refuse_half_copy(records: Records) -> None:
    """Raises `HalfCopy` for the records of a replica whose catch-up has not ended."""
    if replica_state(records).copying:
        raise HalfCopy(
            "this replica catches up, so its records are of no single moment: back up its leader, "
            "or wait until it is in sync (forge pool stats)"
        )


def adopt(directory: Path) -> str:
    """Lets the store in `directory` take over the name of its shard at its next start; the name.
    Raises as `check` does."""
    name = shard_name(directory)
    set_hand_over_mark(directory)
    return name


def compact(directory: Path, progress: Progress, *, purge: bool = False) -> tuple[int, int]:
    """Rewrites the shard in `directory` without its free pages; bytes before and after. `purge` as
    for `backup`.

    Raises `InUse` while it is served, `FailedPrecondition` while another process reads it.
    """
    _require_shard(directory)
    lock = lock_directory(directory)
    copy = compacted(directory)
    try:
        drop_compacted(directory)
        before = (directory / DATA).stat().st_size
        with opened_shard(directory) as environment, new_directory(copy) as unfinished_copy:
            (_copy_records if purge else _copy)(environment, unfinished_copy, progress)
            _compare(environment, unfinished_copy)
        after = (copy / DATA).stat().st_size
        with data_locked(directory):
            exchange_data(directory, copy)
        return before, after
    finally:
        drop_compacted(directory)
        os.close(lock)


def shard_name(directory: Path) -> str:
    """Name of the shard in `directory`, served or not. Raises as `check` does."""
    with snapshot(directory) as (transaction, databases):
        name = Records(transaction, databases).meta_text(SHARD_KEY)
        if not name:
            raise DataLoss(f"{directory} holds a shard without a name")
        return name


def _compare(environment: lmdb.Environment, copy: Path) -> None:
    """Raises `DataLoss` unless the copy has the same number of records in every table."""
    copied = _open(copy)
    try:
        for table in Table:
            name = table.value.encode()
            counts = []
            for opened in (environment, copied):
                database = opened.open_db(name, create=False)
                with opened.begin() as transaction:
                    counts.append(transaction.stat(database)["entries"])
            if counts[0] != counts[1]:
                raise DataLoss(
                    f"the copy has {counts[1]} of {counts[0]} records in {table.value}; "
                    "the shard is left as it was"
                )
    except lmdb.NotFoundError:
        pass  # A table of a later schema: neither has it.
    finally:
        copied.close()


@contextmanager
def new_directory(target: Path, *, keep: Callable[[], bool] = lambda: True) -> Iterator[Path]:
    """A directory beside `target` that gets its name once it is complete and on disk."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FailedPrecondition(f"{target} is there already and not empty: name another")
    filled = unfinished(target)
    with room():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(filled, ignore_errors=True)
        filled.mkdir()
        try:
            yield filled
            if keep():
                sync(filled)
                filled.replace(target)
                sync(target.parent)
        finally:
            shutil.rmtree(filled, ignore_errors=True)


@contextmanager
def room() -> Iterator[None]:
    """Raises `ResourceExhausted` for a full or read-only target."""
    try:
        yield
    except OSError as error:
        raise ResourceExhausted(f"{error.filename or 'the copy'}: {error.strerror}") from None
    except lmdb.Error as error:
        raise ResourceExhausted(f"the copy could not be written: {error}") from None


def _copy(environment: lmdb.Environment, into: Path, progress: Progress) -> None:
    """LMDB's compacting copy, on a thread, as it reports no progress."""
    failures: list[Exception] = []

    def copy() -> None:
        try:
            environment.copy(str(into), compact=True)
        except Exception as error:  # the waiting caller raises it
            failures.append(error)

    total = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    worker = threading.Thread(target=copy, name="copy")
    worker.start()
    while worker.is_alive():
        worker.join(PROGRESS_S)
        path = into / DATA
        progress(path.stat().st_size if path.exists() else 0, total)
    if failures:
        raise failures[0]
    with (into / DATA).open("rb+") as copied:
        os.fsync(copied.fileno())
    progress(total, total)


def _copy_records(environment: lmdb.Environment, into: Path, progress: Progress) -> None:
    """Copies record by record. LMDB's own copy has complete pages, and the unused end of a page may
    have bytes of deleted records."""
    total = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    tables = {name: environment.open_db(name, create=False) for name in _TABLES}
    with environment.begin(buffers=True) as transaction:
        records = ((name, iter(transaction.cursor(db=tables[name]))) for name in _TABLES)
        write_records(into, records, progress, total=total)


def write_records(
    into: Path,
    tables: Iterable[tuple[bytes, Iterator[tuple[Payload, Payload]]]],
    progress: Progress,
    *,
    total: int,
) -> None:
    """Writes a new file with these records of each table, which are in the order of their keys; it
    is on disk at the end. `total`: about their bytes."""
    copy = lmdb.open(str(into), map_size=total + AHEAD_BYTES, max_dbs=len(Table), sync=False)
    done = 0
    try:
        for name, records in tables:
            database = copy.open_db(name)
            left = True
            while left:
                end, left = done + COPY_BYTES, False
                with copy.begin(write=True) as writing:
                    for key, value in records:
                        writing.put(key, value, db=database, append=True)
                        done += len(key) + len(value)
                        if done >= end:
                            left = True
                            break
                progress(min(done, total), total)
        copy.sync(True)
    finally:
        copy.close()
    progress(total, total)


def copy_file(source: Path, target: Path, progress: Callable[[int], None]) -> None:
    """Copies a file; it is on disk at the end. `progress` receives the bytes so far."""
    with source.open("rb") as reader, target.open("xb") as writer:
        while block := reader.read(COPY_BYTES):
            writer.write(block)
            progress(writer.tell())
        writer.flush()
        os.fsync(writer.fileno())
