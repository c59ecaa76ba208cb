"""The LMDB environment of one shard: open, transactions, growth, disk errors.

Owns the open files in the data directory and the size of the map. Every exception that leaves it is
a `ForgeError` or a defect.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from forge.core.errors import ConfigError, DataLoss, ResourceExhausted, Unavailable
from forge.runtime.files.sync import sync
from forge.runtime.telemetry import log
from services.pool.storage.change_trackers import ChangeListener, CompactionLog
from services.pool.storage.environment.file_locks import (
    DATA,
    drop_compacted,
    exchange_data,
    file_bytes,
    lock_directory,
)
from services.pool.storage.environment.migrations import SCHEMA_VERSION, migrate
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

TOOL_READERS = 126
"""Reader slots for other processes, such as backups, so that they never use up our own."""
DISK_RETRY_S = 2.0
"""Pause before the next attempt after the disk was full."""

# A write cut short, which is how a full disk or a quota shows itself in a large page run, comes
# out of LMDB as EIO.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

_PANICS = (lmdb.PanicError, lmdb.ProblemError)
"""This environment is unusable; only a fresh process can open its files again."""

T = TypeVar("T")
OnPanic = Callable[[Unavailable], None]
"""Called once, from the thread that met the first panic of LMDB."""


class Environment:
    """One open shard. `write` from one thread only; `read` from any number."""

    def __init__(
        self,
        directory: Path,
        *,
        map_bytes: int,
        map_max_bytes: int,
        max_readers: int,
        on_panic: OnPanic = lambda _: None,
    ) -> None:
        """Opens or creates the shard in `directory`.

        Raises `ConfigError` if the directory cannot be used or is in use, or for an unknown schema;
        `DataLoss` if there is no intact shard.
        """
        self._on_panic = on_panic
        self._first_panic = threading.Lock()
        """Taken by the first panic, for good."""
        self.directory = directory
        self.map_max_bytes = map_max_bytes
        self._map_bytes = map_bytes
        self._max_readers = max_readers
        self._gate = _Gate()
        self._writing = threading.Lock()
        self._compaction: CompactionLog | None = None
        self._lock: int | None = lock_directory(directory)
        try:
            # Of a process that was killed while it compacted.
            drop_compacted(directory)
            self._lmdb = self._open()
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self._databases = self._open_tables()
            # The files' names must survive a power loss as their content does.
            os.fsync(self._lock)
            self._settle_schema()
        except BaseException:
            self.close()
            raise

    def _open(self) -> lmdb.Environment:
        try:
            return lmdb.open(
                str(self.directory),
                # A shard that has grown beyond the setting opens at the size it has.
                map_size=max(self._map_bytes, file_bytes(self.directory / DATA)),
                max_dbs=len(Table),
                max_readers=self._max_readers + TOOL_READERS,
                max_spare_txns=self._max_readers,
            )
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
            raise DataLoss(
                f"{self.directory} holds no pool shard that can be read: {error}"
            ) from None
        except lmdb.Error as error:
            raise ConfigError(f"data_dir {self.directory} cannot be opened: {error}") from None

    def _open_tables(self) -> dict[Table, Any]:
        with self._errors():
            return {table: self._lmdb.open_db(table.value.encode()) for table in Table}

    def _settle_schema(self) -> None:
        found = self.write(migrate)
        if found != SCHEMA_VERSION:
            log.info(
                "shard_migrated", data_dir=str(self.directory), found=found, now=SCHEMA_VERSION
            )

    def identity(self) -> str:
        """Identity of this directory, generated at the first call; a copy of the data gets
        another."""
        path = self.directory / "replica"
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            with unfinished.open("w") as file:
                file.write(uuid.uuid4().hex)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            sync(self.directory)
        return path.read_text()

    def read(self, look: Callable[[Records], T]) -> T:
        """The result of `look` in one consistent snapshot.

        `look` gets memoryviews into the map, which end with the snapshot: it must copy its
        result. Readers wait only while the map grows.
        """
        with self._gate.shared(), self._errors(), self._lmdb.begin(buffers=True) as transaction:
            return look(Records(transaction, self._databases))

    def write(
        self, change: Callable[[Records], T], *, listeners: Sequence[ChangeListener] = ()
    ) -> T:
        """Applies `change` in one transaction, observed by `listeners`; returns once it is on disk.

        `change` runs again from the start after the map has grown, or after pages of a dead reader
        were freed. Raises `ResourceExhausted` if the disk or the map is full; then nothing of
        `change` is stored, and earlier records are intact.
        """
        with self._writing:
            if self._compaction is not None:
                listeners = (*listeners, self._compaction)
            while True:
                try:
                    with self._errors(), self._lmdb.begin(write=True) as transaction:
                        return change(Records(transaction, self._databases, listeners))
                except lmdb.MapFullError:
                    if not self._dead_readers_gone():
                        self._grow()
                except ResourceExhausted:
                    if not self._dead_readers_gone():
                        raise

    def start_compaction_log(self, limit_bytes: int) -> None:
        """From now on the keys of changed records are logged, up to so many bytes."""
        with self._writing:
            self._compaction = CompactionLog(limit_bytes)

    def take_compaction_log(self) -> CompactionLog:
        """Returns the changes since the start or the last call; logging continues."""
        with self._writing:
            taken = self._compaction
            assert taken is not None
            self._compaction = CompactionLog(taken.limit_bytes)
            return taken

    def stop_compaction_log(self) -> None:
        """Changes are no longer logged."""
        with self._writing:
            self._compaction = None

    def exchange(self, copy: Environment, bring_in: Callable[[CompactionLog], None]) -> None:
        """Replaces the data file by that of `copy` while there is no reader.

        Writes wait from before the call of `bring_in` with the last changes until the exchange is
        made; if it raises, there is no exchange. Closes `copy`. The caller is within `data_locked`.
        """
        with self._writing:
            assert self._compaction is not None
            bring_in(self._compaction)
            copy.close()
            with self._gate.exclusive():
                self._lmdb.close()
                try:
                    exchange_data(self.directory, copy.directory)
                finally:
                    self._lmdb = self._open()
                    self._databases = self._open_tables()

    def _dead_readers_gone(self) -> bool:
        """Frees the pages of readers that died; whether there were any."""
        return bool(self._lmdb.reader_check())

    def _grow(self) -> None:
        size = self.map_bytes
        if size >= self.map_max_bytes:
            raise ResourceExhausted(
                f"the pool shard is full: its map has reached map_max_bytes {self.map_max_bytes}",
                retry_after_s=DISK_RETRY_S,
            )
        # The map moves: no reader may use it meanwhile.
        with self._gate.exclusive():
            self._lmdb.set_mapsize(min(2 * size, self.map_max_bytes))

    @property
    def map_bytes(self) -> int:
        """Size of the memory map."""
        with self._gate.shared(), self._errors():
            return int(self._lmdb.info()["map_size"])

    @property
    def used_bytes(self) -> int:
        """Size of the data file, free pages included."""
        with self._gate.shared(), self._errors():
            return int((self._lmdb.info()["last_pgno"] + 1) * self._lmdb.stat()["psize"])

    @property
    def live_bytes(self) -> int:
        """Bytes of the data file in use by records."""
        with self._gate.shared(), self._errors(), self._lmdb.begin() as transaction:
            trees = [transaction.stat(database) for database in self._databases.values()]
            trees.append(self._lmdb.stat())
        pages = sum(
            tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"] for tree in trees
        )
        return int(pages * trees[-1]["psize"])

    @property
    def disk_free_bytes(self) -> int:
        """Free bytes on the disk."""
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize

    @property
    def room_bytes(self) -> int:
        """Bytes that can still be written: free pages, and the growth of the file."""
        growth_bytes = min(self.disk_free_bytes, self.map_max_bytes - self.used_bytes)
        return growth_bytes + self.used_bytes - self.live_bytes

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translates a full disk, a damaged file and an LMDB panic."""
        try:
            yield
        except lmdb.DiskError as error:
            raise _no_room(error) from None
        except (lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
            raise DataLoss(f"the pool shard is damaged: {error}") from None
        except _PANICS as error:
            raise self._panic(error) from None
        except lmdb.MapFullError:
            raise
        except lmdb.Error as error:
            if error.code not in _NO_ROOM:
                raise
            raise _no_room(error) from None

    def _panic(self, error: lmdb.Error) -> Unavailable:
        """The process must end: this environment can no longer read or write."""
        panic = Unavailable(
            f"LMDB gave up the shard in {self.directory}, which a fresh process opens again: "
            f"{error}",
            retry_after_s=DISK_RETRY_S,
        )
        if self._first_panic.acquire(blocking=False):
            self._on_panic(panic)
        return panic

    def close(self) -> None:
        """Waits for readers; closing twice is harmless."""
        with self._gate.exclusive():
            self._lmdb.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


@contextmanager
def opened_alone(directory: Path) -> Iterator[Environment]:
    """The shard in a directory that no instance serves. Raises as `Environment`."""
    environment = Environment(
        directory,
        map_bytes=file_bytes(directory / DATA),
        map_max_bytes=1 << 40,
        max_readers=1,
    )
    try:
        yield environment
    finally:
        environment.close()


class _Gate:
    """Admits readers, and waits for them before the map moves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._moving = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._moving)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._moving = True
            self._changed.wait_for(lambda: self._readers == 0)
        try:
            yield
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()


def _no_room(error: lmdb.Error) -> ResourceExhausted:
    return ResourceExhausted(
        "the disk refused the commit (full, over a quota, or failing), so nothing of it is "
        f"stored: {error}",
        retry_after_s=DISK_RETRY_S,
    )
