"""Incremental backups: the records that changed since another backup.

    backup.json    the manifest, with the id of the backup it follows
    changes.mdb    the changed records, table by table, and the keys of deleted ones

Owns both directions. An increment is of one snapshot, as a full backup; it is found by comparing
the snapshot with the backup it follows, record by record, so nothing in the store depends on
backups. A chain of increments ends at a full backup, with every directory in one place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from forge.core.errors import ConfigError, DataLoss, FailedPrecondition
from services.pool.maintenance.backup.backup import (
    AHEAD_BYTES,
    COPY_BYTES,
    Progress,
    new_directory,
    opened_shard,
    refuse_half_copy,
    snapshot,
    write_records,
)
from services.pool.maintenance.backup.manifests import (
    BackupManifest,
    manifest_of,
    read_manifest,
    write_manifest,
)
from services.pool.storage.environment.file_locks import DATA
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

CHANGES = "changes.mdb"
MAX_CHAIN = 64
"""Most increments after a full backup."""
_DELETED = b"deleted"
"""Table of the keys of deleted records, each behind the name of its table."""
_PREFIXES = {table: table.value.encode() + b"\0" for table in Table}
_REPORT_EVERY = 1000

Record = tuple[bytes, bytes]
Opened = tuple[Any, dict[bytes, Any]]
"""A transaction, and the tables of its file by name: of an earlier schema not all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """The result of an incremental backup."""

    changed: int
    deleted: int
    size_bytes: int


def is_increment(directory: Path) -> bool:
    """Whether a directory has an incremental backup."""
    return (directory / CHANGES).exists()


def back_up_changes(source: Path, base: Path, target: Path, progress: Progress) -> Increment:
    """Stores what changed in the shard in `source`, live or not, since the backup in `base`, in a
    new directory beside `base`.

    Raises `ConfigError` for a base without a manifest, `FailedPrecondition` for one of another
    lineage, for a target elsewhere and for a chain that is too long; otherwise as `backup`.
    """
    if target.absolute().parent != base.absolute().parent:
        raise FailedPrecondition(
            f"{target} must be beside {base}: a restore needs both in one directory"
        )
    taken_unix_s = time.time()
    with (
        Chain.opened(base) as chain,
        snapshot(source) as (transaction, databases),
        new_directory(target) as made,
    ):
        records = Records(transaction, databases)
        refuse_half_copy(records)
        manifest = manifest_of(records, taken_unix_s=taken_unix_s)
        known = chain.manifest
        if chain.increments >= MAX_CHAIN:
            raise FailedPrecondition(
                f"{base} ends a chain of {MAX_CHAIN} increments: make a full backup"
            )
        if (manifest.shard, manifest.lineage) != (known.shard, known.lineage):
            raise FailedPrecondition(
                f"{base} is a backup of shard {known.shard!r}, lineage {known.lineage}; {source} "
                f"has shard {manifest.shard!r}, lineage {manifest.lineage}"
            )
        total = sum(transaction.stat(database)["entries"] for database in databases.values())
        changed, deleted = _write_changes(
            made / CHANGES, chain, transaction, databases, lambda done: progress(done, total)
        )
        manifest = msgspec.structs.replace(
            manifest,
            base_id=known.backup_id,
            base=base.absolute().name,
            changed=changed,
            deleted=deleted,
            digest=_digest(made / CHANGES),
        )
        write_manifest(made, manifest)
        size_bytes = (made / CHANGES).stat().st_size
    return Increment(changed=changed, deleted=deleted, size_bytes=size_bytes)


def write_restored(backup: Path, into: Path, progress: Progress) -> None:
    """Writes the shard that an incremental backup shows, in a new file. Raises `ConfigError` when a
    backup of its chain is missing, `DataLoss` when one is damaged, `FailedPrecondition` when one
    was changed."""
    with Chain.opened(backup) as chain:
        tables = ((table.value.encode(), chain.records(table)) for table in Table)
        write_records(into, tables, progress, total=chain.size_bytes)


class Chain:
    """A full backup and the increments after it, open for reading."""

    def __init__(self, full: Opened, size_bytes: int) -> None:
        self._full = full
        self._increments: list[Opened] = []
        self.size_bytes = size_bytes
        """Size of all files."""
        self.manifest: BackupManifest
        """Manifest of the last backup."""

    @classmethod
    @contextmanager
    def opened(cls, last: Path) -> Iterator[Chain]:
        """The chain that ends with `last`. Raises as `write_restored`."""
        directories = [last]
        while is_increment(directories[0]):
            # One more: an earlier release took it.
            if len(directories) > MAX_CHAIN + 1:
                raise FailedPrecondition(f"{last} has more than {MAX_CHAIN} increments before it")
            directories.insert(0, _base_of(directories[0]))
        with ExitStack() as stack:
            environment = stack.enter_context(opened_shard(directories[0]))
            full = stack.enter_context(_reading(environment))
            chain = cls(full, (directories[0] / DATA).stat().st_size)
            for directory in directories[1:]:
                chain._increments.append(stack.enter_context(_opened_changes(directory)))
                chain.size_bytes += (directory / CHANGES).stat().st_size
            chain.manifest = read_manifest(last)
            yield chain

    @property
    def increments(self) -> int:
        """Number of increments."""
        return len(self._increments)

    def records(self, table: Table) -> Iterator[Record]:
        """The records of a table as they lie on disk, in the order of keys."""
        name = table.value.encode()
        transaction, tables = self._full
        records = _items(transaction, tables.get(name))
        for changes, tables in self._increments:
            records = _overlaid(
                records,
                _items(changes, tables.get(name)),
                _keys(changes, tables[_DELETED], prefix=_PREFIXES[table]),
            )
        return records


def _base_of(increment: Path) -> Path:
    manifest = read_manifest(increment)
    base = increment.absolute().parent / manifest.base
    if not (base / DATA).exists() and not is_increment(base):
        raise ConfigError(f"{increment} follows the backup {manifest.base}, which is not beside it")
    if read_manifest(base).backup_id != manifest.base_id:
        raise FailedPrecondition(
            f"{increment} follows an earlier content of {base}, which was erased in or replaced: "
            "the increment cannot be restored"
        )
    return base


@contextmanager
def _opened_changes(directory: Path) -> Iterator[Opened]:
    path = directory / CHANGES
    if _digest(path) != read_manifest(directory).digest:
        raise DataLoss(f"{path} is damaged: its digest does not match")
    environment = lmdb.open(
        str(path), subdir=False, readonly=True, lock=False, max_dbs=len(Table) + 1
    )
    try:
        with _reading(environment, _DELETED) as opened:
            yield opened
    finally:
        environment.close()


@contextmanager
def _reading(environment: lmdb.Environment, *more: bytes) -> Iterator[Opened]:
    tables = {}
    for name in (*(table.value.encode() for table in Table), *more):
        with suppress(lmdb.NotFoundError):
            tables[name] = environment.open_db(name, create=False)
    with environment.begin(buffers=True) as transaction:
        yield transaction, tables


def _write_changes(
    path: Path, chain: Chain, transaction: Any, databases: dict[Table, Any], progress: Any
) -> tuple[int, int]:
    """Compares a snapshot with a chain; the numbers of changed and deleted records."""
    into = lmdb.open(
        str(path),
        subdir=False,
        lock=False,
        map_size=chain.size_bytes + AHEAD_BYTES,
        max_dbs=len(Table) + 1,
        sync=False,
    )
    changed = deleted = done = 0
    try:
        gone = into.open_db(_DELETED)
        for table in Table:
            target = into.open_db(table.value.encode())
            writing = into.begin(write=True)
            written = 0
            for key, value in _differences(
                chain.records(table), _items(transaction, databases[table])
            ):
                done += 1
                if done % _REPORT_EVERY == 0:
                    progress(done)
                if value is _SAME:
                    continue
                if value is None:
                    writing.put(_PREFIXES[table] + key, b"", db=gone)
                    deleted += 1
                else:
                    writing.put(key, value, db=target, append=True)
                    changed += 1
                written += len(key) + len(value or b"")
                if written >= COPY_BYTES:
                    writing.commit()
                    writing, written = into.begin(write=True), 0
            writing.commit()
        into.sync(True)
    finally:
        into.close()
    return changed, deleted


_SAME = b"same"
"""Stands for a record that did not change; compared by identity."""


def _differences(
    before: Iterator[Record], now: Iterator[Record]
) -> Iterator[tuple[bytes, bytes | None]]:
    """Each key with its new value, None for a deleted one, `_SAME` for an unchanged one."""
    old, new = next(before, None), next(now, None)
    while old is not None or new is not None:
        if new is None or (old is not None and old[0] < new[0]):
            assert old is not None
            yield old[0], None
            old = next(before, None)
        elif old is None or new[0] < old[0]:
            yield new
            new = next(now, None)
        else:
            yield new[0], _SAME if old[1] == new[1] else new[1]
            old, new = next(before, None), next(now, None)


def _overlaid(
    below: Iterator[Record], above: Iterator[Record], deleted: Iterator[bytes]
) -> Iterator[Record]:
    """The records of `below` with the changes of an increment; all in the order of keys."""
    old, new, gone = next(below, None), next(above, None), next(deleted, None)
    while old is not None or new is not None:
        if new is None or (old is not None and old[0] < new[0]):
            assert old is not None
            while gone is not None and gone < old[0]:
                gone = next(deleted, None)
            if gone != old[0]:
                yield old
            old = next(below, None)
        else:
            if old is not None and old[0] == new[0]:
                old = next(below, None)
            yield new
            new = next(above, None)


def _items(transaction: Any, database: Any) -> Iterator[Record]:
    """The records of a table; none without the table."""
    if database is None:
        return
    with transaction.cursor(db=database) as cursor:
        for key, value in cursor:
            yield bytes(key), bytes(value)


def _keys(transaction: Any, database: Any, *, prefix: bytes) -> Iterator[bytes]:
    """Keys without their prefix."""
    with transaction.cursor(db=database) as cursor:
        found = cursor.set_range(prefix)
        while found and bytes(cursor.key()).startswith(prefix):
            yield bytes(cursor.key())[len(prefix) :]
            found = cursor.next()


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=32)
    with path.open("rb") as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()
