"""Weight versions as files that a trainer writes and many workers read: the ways beside gRPC.

One file a version, named by the sha256 of its manifest, with the data of all tensors. A directory
of `/dev/shm` is shared memory: readers map the file, and all processes of the host have one copy.
In any other directory, which may be on a network, readers copy the file to their own memory, since
a mapped page that the server lost would end the process.

A file is written beside and renamed: it is complete or absent. Several processes may each write a
segment; the one that began the file renames it. It is of the reader's own user with
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
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forge.core.errors import DataLoss
from forge.core.named_tensor import NamedTensor
from forge.runtime.files.write_at import write_at
from forge.runtime.weights.manifest import TensorEntry, slice_digests, slices_of

_PREFIX = "forge-weights-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{64}}(\.[0-9a-f]{{16}})?")
ALIGNED_BYTES = 64
"""Alignment of the first byte of each tensor."""
_PIECE_BYTES = 1 << 24
_MODE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """The file of a version while it is written."""

    path: Path
    complete: Path
    """Path of the complete file."""
    opened: int
    """Descriptor with the lock."""
    size_bytes: int


class VersionFiles:
    """The versions that this process has written into one directory. Not thread-safe."""

    def __init__(self, directory: Path, *, mapped: bool) -> None:
        """`mapped`: shared memory, otherwise a directory of any file system."""
        self._directory = directory
        self.mapped = mapped
        self._written: dict[int, tuple[Path, int]] = {}
        """By version the file, and its descriptor with the lock."""

    def write(
        self, version: int, manifest: str, tensors: Sequence[NamedTensor]
    ) -> Sequence[NamedTensor]:
        """Write a version whose manifest has this sha256. Returns its tensors, mapped if the
        directory is shared memory. Raises `OSError`, for example when the memory is full."""
        sizes = [memoryview(one.data).nbytes for one in tensors]
        unfinished = self.begin(manifest, sizes)
        try:
            kept = write_segment(
                unfinished.path, tensors, starts_of(sizes)[:-1], mapped=self.mapped
            )
            self.complete(version, unfinished)
        except BaseException:
            self.abandon(unfinished)
            raise
        return kept

    def begin(self, manifest: str, sizes: Sequence[int]) -> Unfinished:
        """Make the file of a version with tensors of these sizes, in bytes, and room for them.
        Raises `OSError`."""
        self._remove_abandoned()
        complete = self._directory / f"{_PREFIX}{manifest}"
        path = complete.with_name(f"{complete.name}.{secrets.token_hex(8)}")
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        unfinished = Unfinished(
            path=path, complete=complete, opened=opened, size_bytes=starts_of(sizes)[-1]
        )
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Reserves the space: memory that ends during the copy would end the process.
            os.posix_fallocate(opened, 0, unfinished.size_bytes)
        except BaseException:
            self.abandon(unfinished)
            raise
        return unfinished

    def complete(self, version: int, unfinished: Unfinished) -> None:
        """Make a file visible in which all tensors are. Raises `OSError`."""
        unfinished.path.replace(unfinished.complete)
        self._written[version] = unfinished.complete, unfinished.opened

    def abandon(self, unfinished: Unfinished) -> None:
        """Remove a file that was not completed."""
        os.close(unfinished.opened)
        with suppress(OSError):
            unfinished.path.unlink()

    def descriptor(self, version: int) -> int:
        """Return a further descriptor of the file of a written version; the caller closes it."""
        return os.dup(self._written[version][1])

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


def write_segment(
    path: Path, tensors: Sequence[NamedTensor], starts: Sequence[int], *, mapped: bool
) -> Sequence[NamedTensor]:
    """Write tensors into an existing file, each at its start; durably unless it is shared memory.
    Returns the tensors, `mapped` from the file. Raises `OSError`."""
    opened = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for one, start in zip(tensors, starts, strict=True):
            write_at(opened, memoryview(one.data), start)
        if not mapped:
            os.fsync(opened)
            return tensors
        data = memoryview(mmap.mmap(opened, 0, prot=mmap.PROT_READ))
    finally:
        os.close(opened)
    return [
        NamedTensor(
            name=one.name,
            dtype=one.dtype,
            shape=one.shape,
            data=data[start : start + memoryview(one.data).nbytes],
        )
        for one, start in zip(tensors, starts, strict=True)
    ]


def starts_of(sizes: Sequence[int], *, aligned_bytes: int = ALIGNED_BYTES) -> list[int]:
    """Return the first byte of each tensor in a file, and the size of the file: at least one block,
    since an empty file cannot be mapped."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // aligned_bytes) * aligned_bytes)
    return [*starts[:-1], max(aligned_bytes, starts[-1])]


def read_version(
    directory: Path, manifest: str, entries: Sequence[TensorEntry], *, mapped: bool
) -> list[NamedTensor]:
    """Return the tensors of the version whose manifest has this sha256.

    Raises `FileNotFoundError` without a file, `DataLoss` for one of another user, with other rights
    or with other data than the manifest's, `OSError` for one that cannot be read.
    """
    path = directory / f"{_PREFIX}{manifest}"
    *starts, size_bytes = starts_of([one.size_bytes for one in entries])
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
    for entry, start in zip(entries, starts, strict=True):
        try:
            tensors.append(verified_tensor(entry, data[start : start + entry.size_bytes]))
        except DataLoss as error:
            raise DataLoss(f"{path}: {error}") from None
    return tensors


def verified_tensor(entry: TensorEntry, data: memoryview) -> NamedTensor:
    """Return the tensor of an entry with this data. Raises `DataLoss` for other data."""
    if slice_digests(slices_of(data)) != entry.digests:
        raise DataLoss(f"{entry.name} is damaged: not the announced digests")
    return NamedTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=data)


def _require_own(path: Path, found: os.stat_result, size_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise DataLoss(f"{path} is not a file of this user: user {found.st_uid}")
    if stat.S_IMODE(found.st_mode) != _MODE:
        raise DataLoss(f"{path} has mode {stat.S_IMODE(found.st_mode):o}, not {_MODE:o}")
    if found.st_size != size_bytes:
        raise DataLoss(f"{path} has {found.st_size} bytes, not {size_bytes}")


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
