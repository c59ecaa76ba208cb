"""Weight versions as files that a trainer writes and many workers read: the ways beside gRPC.

One file a version, named by the sha256 of its manifest, with the data of all tensors. A directory
of `/dev/shm` is shared memory: readers map the file, and all processes of the host have one copy.
In any other directory, which may be on a network, readers copy the file to their own memory, since
a mapped page that the server lost would end the process.

A file is written beside and renamed: it is complete or absent. It is of the reader's own user with
mode 0600, and no link, so no other user can plant one. The reader compares each slice with the
manifest. A writer holds a lock on its files; those of a dead one are removed by the next writer.
Not here: the manifest, which is streamed, and which version to read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from forge.core.errors import DataLoss
from forge.core.named_tensor import NamedTensor
from forge.runtime.weights.manifest import TensorEntry, slice_digests, slices_of

_PREFIX = "forge-weights-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{64}}(\.[0-9a-f]{{16}})?")
_ALIGNED_BYTES = 64
"""Of the first byte of each tensor."""
_PIECE_BYTES = 1 << 24
_MODE = 0o600


class VersionFiles:
    """The versions that this process has written into one directory. Not thread-safe."""

    def __init__(self, directory: Path, *, mapped: bool) -> None:
        """`mapped`: shared memory, otherwise a directory of any file system."""
        self._directory = directory
        self._mapped = mapped
        self._written: dict[int, tuple[Path, int]] = {}
        """By version the file, and its descriptor with the lock."""

    def write(
        self, version: int, manifest: str, tensors: Sequence[NamedTensor]
    ) -> Sequence[NamedTensor]:
        """Write a version whose manifest has this sha256. Returns its tensors, mapped if the
        directory is shared memory. Raises `OSError`, for example when the memory is full."""
        self._remove_abandoned()
        path = self._directory / f"{_PREFIX}{manifest}"
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        opened = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entries = [(one.name, memoryview(one.data).nbytes) for one in tensors]
            size_bytes = _size_of([size for _, size in entries])
            # Reserves the space: memory that ends during the copy would end the process.
            os.posix_fallocate(opened, 0, size_bytes)
            for one, start in zip(tensors, _starts([size for _, size in entries]), strict=True):
                _write_at(opened, memoryview(one.data), start)
            if not self._mapped:
                os.fsync(opened)
            kept = _mapped_tensors(opened, tensors, size_bytes) if self._mapped else tensors
            unfinished.replace(path)
        except BaseException:
            os.close(opened)
            with suppress(OSError):
                unfinished.unlink()
            raise
        self._written[version] = path, opened
        return kept

    def keep(self, versions: Collection[int]) -> None:
        """Remove all other versions; processes that have mapped one keep its data."""
        for version in self._written.keys() - set(versions):
            path, opened = self._written.pop(version)
            with suppress(OSError):
                path.unlink()
            os.close(opened)

    def _remove_abandoned(self) -> None:
        """Remove files of this user whose writer has ended."""
        own = {path for path, _ in self._written.values()}
        for path in self._directory.glob(f"{_PREFIX}*"):
            if path in own or not _NAME.fullmatch(path.name):
                continue
            with suppress(OSError):
                opened = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    if os.fstat(opened).st_uid == os.geteuid():
                        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()
                finally:
                    os.close(opened)


def read_version(
    directory: Path, manifest: str, entries: Sequence[TensorEntry], *, mapped: bool
) -> list[NamedTensor]:
    """Return the tensors of the version whose manifest has this sha256.

    Raises `FileNotFoundError` without a file, `DataLoss` for one of another user, with other rights
    or with other data than the manifest's, `OSError` for one that cannot be read.
    """
    path = directory / f"{_PREFIX}{manifest}"
    sizes = [one.size_bytes for one in entries]
    size_bytes = _size_of(sizes)
    # A pipe must not block, and a link is refused.
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_own(path, os.fstat(opened), size_bytes)
        if mapped:
            data = memoryview(mmap.mmap(opened, size_bytes, prot=mmap.PROT_READ))
        else:
            data = _read_whole(opened, path, size_bytes)
    finally:
        os.close(opened)
    tensors = []
    for entry, start in zip(entries, _starts(sizes), strict=True):
        part = data[start : start + entry.size_bytes]
        if slice_digests(slices_of(part)) != entry.digests:
            raise DataLoss(f"{path}: {entry.name} is damaged: not the announced digests")
        tensors.append(
            NamedTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=part)
        )
    return tensors


def _require_own(path: Path, found: os.stat_result, size_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise DataLoss(f"{path} is no file of this user: user {found.st_uid}")
    if stat.S_IMODE(found.st_mode) != _MODE:
        raise DataLoss(f"{path} has mode {stat.S_IMODE(found.st_mode):o}, not {_MODE:o}")
    if found.st_size != size_bytes:
        raise DataLoss(f"{path} has {found.st_size} bytes, not {size_bytes}")


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    start = 0
    for size in sizes:
        yield start
        start += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _size_of(sizes: Sequence[int]) -> int:
    """Bytes of the file; at least one block, since an empty file cannot be mapped."""
    return max(_ALIGNED_BYTES, sum(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes))


def _write_at(opened: int, data: memoryview, start: int) -> None:
    data, done = data.cast("B"), 0
    while done < data.nbytes:
        done += os.pwrite(opened, data[done : done + _PIECE_BYTES], start + done)


def _read_whole(opened: int, path: Path, size_bytes: int) -> memoryview:
    try:
        buffer = memoryview(bytearray(size_bytes))
    except MemoryError:
        raise OSError(f"{path}: there is no memory for its {size_bytes} bytes") from None
    done = 0
    while done < size_bytes:
        count = os.preadv(opened, [buffer[done : done + _PIECE_BYTES]], done)
        if not count:
            raise DataLoss(f"{path} became shorter: {done} of {size_bytes} bytes")
        done += count
    return buffer.toreadonly()


def _mapped_tensors(
    opened: int, tensors: Sequence[NamedTensor], size_bytes: int
) -> list[NamedTensor]:
    data = memoryview(mmap.mmap(opened, size_bytes, prot=mmap.PROT_READ))
    sizes = [memoryview(one.data).nbytes for one in tensors]
    return [
        NamedTensor(
            name=one.name, dtype=one.dtype, shape=one.shape, data=data[start : start + size]
        )
        for one, start, size in zip(tensors, _starts(sizes), sizes, strict=True)
    ]
