"""Keys and values from a prefill to a decode process on the same host, in a file in memory.

The sender writes them once; the receiver maps the file and removes its name. Both must see the same
directory: they compare its device and inode and the host's boot id. Both must run as the same user:
the file's mode admits no other. The name is random; the receiver opens only names of this form.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress

from xxhash import xxh3_64

from forge.core.errors import DataLoss
from forge.runtime.files import host_memory
from forge.runtime.files.write_at import write_at

_DIRECTORY = host_memory.DIRECTORY
_PREFIX = "forge-kv-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
LEAST_BYTES = 1 << 20
"""Smaller spans travel in the message: a file costs more than it saves."""
_ABANDONED_S = 600.0
_PIECE_BYTES = 1 << 20


def write(data: bytes | memoryview) -> tuple[str, int]:
    """Write a file; return its name and checksum. Raises OSError, for example for full memory."""
    _remove_abandoned()
    name = _PREFIX + secrets.token_hex(16)
    path = _DIRECTORY / name
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Full memory is an error before the first byte.
        os.posix_fallocate(opened, 0, max(1, len(data)))
        write_at(opened, data, 0)
    except BaseException:
        remove(name)
        raise
    finally:
        os.close(opened)
    return name, _checksum(data)


def read(name: str, *, size: int, checksum: int) -> memoryview:
    """Return the content, mapped, and remove the file. Raises DataLoss for another content, OSError
    without the file."""
    if not _NAME.fullmatch(name):
        raise DataLoss(f"shared memory {name[:80]!r} is not a name of a hand-off")
    opened = os.open(_DIRECTORY / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid() or found.st_size != max(1, size):
            raise DataLoss(f"shared memory {name} has {found.st_size} bytes, not {size}")
        mapped = mmap.mmap(opened, max(1, size), prot=mmap.PROT_READ)
    finally:
        os.close(opened)
        remove(name)
    data = memoryview(mapped)[:size]
    if _checksum(data) != checksum:
        raise DataLoss(f"shared memory {name} is damaged: wrong checksum")
    return data


def _pieces(data: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the data in pieces: a digest may hold the interpreter, which the event loop needs."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _PIECE_BYTES):
        yield start, view[start : start + _PIECE_BYTES]


def _checksum(data: bytes | memoryview) -> int:
    found = xxh3_64()
    for _, piece in _pieces(data):
        found.update(piece)
    return found.intdigest()


def remove(name: str) -> None:
    """Remove a file, if it is there."""
    if _NAME.fullmatch(name):
        with suppress(FileNotFoundError):
            (_DIRECTORY / name).unlink()


def _remove_abandoned() -> None:
    """Remove files of this user whose receiver died."""
    oldest_s = time.time() - _ABANDONED_S
    for path in _DIRECTORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = path.stat()
            if found.st_uid == os.geteuid() and found.st_mtime < oldest_s:
                path.unlink()
