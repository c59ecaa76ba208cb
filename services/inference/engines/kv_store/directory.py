"""The directory of all blocks, bounded in bytes and shared by any number of processes and hosts.

    <directory>/<identity>/<first two digits of the chain hash>/<chain hash>
    <directory>/.<name>.tmp    a block that is being written, of its full length
    <directory>/.evicting      the lock of the directory; its content is the size of all blocks

Any shared file system with atomic renames and locks will do. No process owns the directory: each
writes, reads and evicts. The blocks that were read least recently go first, those of earlier
weights among them.

The bound holds at each moment: a writer reserves its block under the lock before it writes, and
first evicts if there is no room. A size that is too high, after a killed writer or a refused block,
is corrected by the next look at all files, which comes before each eviction.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge.core.errors import ConfigError
from forge.runtime.telemetry import log
from services.inference.engines.kv_store.block_file import (
    BadBlock,
    file_bytes,
    read_block,
    write_block,
)
from services.inference.engines.kv_store.metrics import BLOCKS, RECREATIONS, STORE_BYTES

_EVICT_TO = 0.9
_ABANDONED_S = 3600.0
"""Age from which an unfinished file is that of a dead process."""
_TOUCH_S = 60.0
"""A block read more often than this is not marked again."""
LOCK_S = 2.0
"""Longest wait for the lock; then the block is dropped."""
_LOCK_PAUSE_S = 0.002
_SIZE_BYTES = 8
_LOCK = ".evicting"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class _LockBusy(Exception):
    """Another process has the lock of the directory for too long."""


class BlockDirectory:
    """The blocks of a directory. Used by one thread for writes and another for reads."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        """Raises ConfigError for a directory that cannot be made or written."""
        self._root = root
        self._max_bytes = max_bytes
        try:
            self._lock = self._open_lock()
        except OSError as error:
            raise ConfigError(f"kv.store_dir = {str(root)!r}: {error.strerror}") from None

    def _open_lock(self) -> int:
        """Make the directory and its lock file, if missing. Raises OSError."""
        self._root.mkdir(parents=True, exist_ok=True)
        return os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT, 0o660)

    def _is_deleted(self) -> bool:
        """Whether the open lock file is not the one of the directory any more."""
        try:
            return not os.path.samestat((self._root / _LOCK).stat(), os.fstat(self._lock))
        except FileNotFoundError:
            return True

    def _recreate(self) -> None:
        """Make a deleted directory again, unless another process has. Raises OSError."""
        lock = self._open_lock()
        os.close(self._lock)
        self._lock = lock
        RECREATIONS.inc()
        log.warning("kv_store_recreated", directory=str(self._root))

    def close(self) -> None:
        """Close the lock file."""
        os.close(self._lock)

    def has(self, identity: bytes, chain: bytes) -> bool:
        """Whether there is a block, good or bad."""
        return self._path(identity, chain).exists()

    def read(self, identity: bytes, chain: bytes) -> memoryview | None:
        """Return a block's content; None without a good one. A bad one is counted and removed."""
        path = self._path(identity, chain)
        try:
            content = read_block(path, identity=identity, chain=chain)
        except BadBlock as error:
            BLOCKS.labels(error.defect).inc()
            log.warning("kv_block_refused", file=str(path), defect=error.defect)
            with suppress(OSError):
                path.unlink()
            return None
        except OSError as error:
            BLOCKS.labels("failed").inc()
            log.warning("kv_block_not_read", file=str(path), error=str(error))
            return None
        if content is not None:
            # Evicted meanwhile, or only readable here: the content is good all the same.
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _TOUCH_S:
                    os.utime(path)
        return content

    def write(self, identity: bytes, chain: bytes, content: bytes | memoryview) -> None:
        """Write a block; evict before if there is no room. A block that is not written is counted,
        a failure also logged."""
        path = self._path(identity, chain)
        unfinished = self._root / f".{uuid.uuid4().hex}.tmp"
        try:
            try:
                self._reserve(unfinished, file_bytes(content))
                write_block(unfinished, content, identity=identity, chain=chain)
                self._publish(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)
        except _LockBusy:
            BLOCKS.labels("dropped").inc()
        except OSError as error:
            BLOCKS.labels("failed").inc()
            log.warning("kv_block_not_written", file=str(path), error=str(error))
            if error.errno in _NO_SPACE:
                self._make_space()
        else:
            BLOCKS.labels("written").inc()

    def _reserve(self, unfinished: Path, size: int) -> None:
        """Make an empty file of `size` bytes within the bound. Raises _LockBusy and OSError."""
        if size > self._max_bytes:
            raise OSError(f"a block of {size} bytes is above kv.store_mib")
        with self._locked():
            total = self._read_size()
            if total is None or total + size > self._max_bytes:
                total = self._evict(room=size)
            if total + size > self._max_bytes:
                raise OSError(
                    f"{total} bytes that are unfinished or cannot be removed leave no room for a "
                    f"block of {size}"
                )
            # The size first: if this process is killed now, it is too high, never too low.
            self._write_size(total + size)
            with unfinished.open("xb") as file:
                file.truncate(size)

    def _publish(self, unfinished: Path, path: Path) -> None:
        """Give a written block its name. Raises as `_reserve`."""
        with self._locked():
            if path.exists():
                # Another process has written it meanwhile; the size counts both.
                self._write_size(max(0, (self._read_size() or 0) - unfinished.stat().st_size))
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.replace(path)

    def _make_space(self) -> None:
        """Evict a tenth of all blocks: the disk, or a quota, is full below the bound."""
        with suppress(_LockBusy, OSError), self._locked():
            self._write_size(self._evict(is_full=True))

    def _evict(self, *, room: int = 0, is_full: bool = False) -> int:
        """Look at all files; without `room` remove the least recently read blocks down to nine
        tenths of the bound, or further. Return the size of the files that are left. `is_full`: the
        bound is their present size."""
        blocks, unfinished_bytes = self._files()
        total = unfinished_bytes + sum(size for _, size, _ in blocks)
        bound = total if is_full else self._max_bytes
        if is_full or total + room > bound:
            most = min(bound * _EVICT_TO, bound - room)
            for _, size, path in sorted(blocks):
                if total <= most:
                    break
                if _removed(path):
                    BLOCKS.labels("evicted").inc()
                    total -= size
            self._remove_empty_folders()
        return total

    def _files(self) -> tuple[list[tuple[float, int, Path]], int]:
        """Return time of the last use, size and path of each block, and the size of unfinished
        files; remove abandoned ones. Earlier releases write them beside the block."""
        oldest_s = self._now_s() - _ABANDONED_S
        blocks: list[tuple[float, int, Path]] = []
        unfinished_bytes = 0
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder, name)
                # Another process has removed it, or it is not for this user.
                with suppress(OSError):
                    found = path.stat()
                    if not name.startswith("."):
                        blocks.append((found.st_mtime, found.st_size, path))
                    elif name.endswith(".tmp") and found.st_mtime < oldest_s:
                        path.unlink()
                    elif name.endswith(".tmp"):
                        unfinished_bytes += found.st_size
        return blocks, unfinished_bytes

    def _now_s(self) -> float:
        """Return the time by the clock that sets the times of files, perhaps that of another
        host."""
        os.utime(self._lock)
        return os.fstat(self._lock).st_mtime

    def _remove_empty_folders(self) -> None:
        for folder, _, _ in os.walk(self._root, topdown=False):
            if Path(folder) != self._root:
                # Not empty.
                with suppress(OSError):
                    Path(folder).rmdir()

    def _read_size(self) -> int | None:
        """Return the size of all blocks; None in a directory of an earlier release."""
        data = os.pread(self._lock, _SIZE_BYTES, 0)
        return int.from_bytes(data, "little") if len(data) == _SIZE_BYTES else None

    def _write_size(self, size: int) -> None:
        os.pwrite(self._lock, size.to_bytes(_SIZE_BYTES, "little"), 0)
        STORE_BYTES.set(size)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock of the directory, which is made again if it was deleted. Raises _LockBusy, and
        OSError on a file system without locks."""
        give_up_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._is_deleted():
                    break
                self._recreate()
            except BlockingIOError:
                if time.monotonic() >= give_up_s:
                    raise _LockBusy from None
                time.sleep(_LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _path(self, identity: bytes, chain: bytes) -> Path:
        name = chain.hex()
        return self._root / identity.hex() / name[:2] / name


def _removed(path: Path) -> bool:
    """Whether a file is gone; False for one that this user may not remove."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("kv_block_not_removed", file=str(path), error=str(error))
        return False
    return True
