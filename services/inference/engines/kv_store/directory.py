"""The directory of all blocks, bounded in bytes and shared by any number of processes and hosts.

    <directory>/<identity>/<first two digits of the chain hash>/<chain hash>

Any shared file system with atomic renames will do. No process owns the directory: each writes,
reads and evicts. The blocks that were read least recently go first, those of earlier weights among
them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge.core.errors import ConfigError
from forge.runtime.telemetry import log
from services.inference.engines.kv_store.block_file import BadBlock, read_block, write_block
from services.inference.engines.kv_store.metrics import BLOCKS, STORE_BYTES

_EVICT_TO = 0.9
_SCAN_SHARE = 0.05
"""A process looks at the size again when it has written this share of the bound."""
_ABANDONED_S = 3600.0
"""Age from which an unfinished file is that of a dead process."""
_TOUCH_S = 60.0
"""A block read more often than this is not marked again."""


class BlockDirectory:
    """The blocks of a directory. Used by one thread for writes and another for reads."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        """Raises ConfigError for a directory that cannot be made or written."""
        self._root = root
        self._max_bytes = max_bytes
        self._written = max_bytes
        """Bytes since the last look at the size; the first write looks."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(root / ".evicting", os.O_RDWR | os.O_CREAT, 0o660)
        except OSError as error:
            raise ConfigError(f"kv.store_dir = {str(root)!r}: {error.strerror}") from None

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
            if content is not None and time.time() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path)
        except BadBlock as error:
            BLOCKS.labels(error.defect).inc()
            log.warning("kv_block_refused", file=str(path), defect=error.defect)
            with suppress(OSError):
                path.unlink()
            return None
        except FileNotFoundError:
            return None
        except OSError as error:
            BLOCKS.labels("failed").inc()
            log.warning("kv_block_not_read", file=str(path), error=str(error))
            return None
        return content

    def write(self, identity: bytes, chain: bytes, content: bytes) -> None:
        """Write a block, then evict if the directory is full. A failure is counted and logged."""
        path = self._path(identity, chain)
        try:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_block(path, content, identity=identity, chain=chain)
            except FileNotFoundError:
                # An eviction has just removed the empty folder.
                path.parent.mkdir(parents=True, exist_ok=True)
                write_block(path, content, identity=identity, chain=chain)
        except OSError as error:
            BLOCKS.labels("failed").inc()
            log.warning("kv_block_not_written", file=str(path), error=str(error))
            return
        BLOCKS.labels("written").inc()
        self._written += len(content)
        if self._written > self._max_bytes * _SCAN_SHARE:
            self.evict()

    def evict(self) -> None:
        """Remove the least recently read blocks down to the bound, unless another process does."""
        self._written = 0
        with self._evicting() as alone:
            if not alone:
                return
            found = sorted(self._files())
            total = sum(size for _, size, _ in found)
            STORE_BYTES.set(total)
            if total <= self._max_bytes:
                return
            for _, size, path in found:
                if total <= self._max_bytes * _EVICT_TO:
                    break
                with suppress(FileNotFoundError):
                    path.unlink()
                    BLOCKS.labels("evicted").inc()
                total -= size
            STORE_BYTES.set(total)
            self._remove_empty_folders()

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield time of the last use, size and path of each block; remove abandoned files."""
        oldest_s = time.time() - _ABANDONED_S
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    found = path.stat()
                    if not name.startswith("."):
                        yield found.st_mtime, found.st_size, path
                    elif name.endswith(".tmp") and found.st_mtime < oldest_s:
                        path.unlink()

    def _remove_empty_folders(self) -> None:
        for folder, _, _ in os.walk(self._root, topdown=False):
            if Path(folder) != self._root:
                # Not empty, or a writer has just made a file in it.
                with suppress(OSError):
                    Path(folder).rmdir()

    @contextmanager
    def _evicting(self) -> Iterator[bool]:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _path(self, identity: bytes, chain: bytes) -> Path:
        name = chain.hex()
        return self._root / identity.hex() / name[:2] / name
