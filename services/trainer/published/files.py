"""Files of published versions: holds and numbers survive the restart of a trainer.

One directory a held version, written beside, fsynced and renamed: it is complete or absent. The
data is mapped, not read: a held version takes no memory.

    tensors.bin         data of all tensors, in the manifest's order
    manifest.json       as it was published
    published.json      announcement and time of publication

One file has the highest number of all versions.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from forge.core.errors import DataLoss, ResourceExhausted
from forge.core.named_tensor import NamedTensor
from forge.runtime.files.private import replace_private_file
from forge.runtime.files.sync import sync
from forge.runtime.weights import (
    HeldWeights,
    TensorEntry,
    WeightAnnouncement,
    content_digest,
)
from services.trainer.published.versions import PublishedVersion

HELD_DIRECTORY = "held"
"""In `checkpoint.dir`."""
_PREFIX = "version-"
_UNFINISHED = ".unfinished"
_TENSORS = "tensors.bin"
_MANIFEST = "manifest.json"
_PUBLISHED = "published.json"
_NUMBER = "weight-version"


class _Published(msgspec.Struct, frozen=True, kw_only=True):
    announcement: WeightAnnouncement
    published_unix_s: float


class VersionNumber:
    """The highest number that trainers with one `checkpoint.dir` have given to weights.

    An etcd that is restored from an older snapshot has a lower one, and workers with newer weights
    may be away when a trainer starts.
    """

    def __init__(self, checkpoints: Path) -> None:
        self._file = checkpoints / _NUMBER
        self._held = checkpoints / HELD_DIRECTORY

    def highest(self) -> int:
        """The number; 0 without one."""
        found = [path.name.removeprefix(_PREFIX) for path in self._held.glob(f"{_PREFIX}*")]
        with suppress(OSError, UnicodeDecodeError):
            found.append(self._file.read_text().strip())
        return max((int(number) for number in found if number.isdecimal()), default=0)

    def raise_to(self, version: int) -> None:
        """Store `version` durably if it is higher. Raises `OSError`."""
        if version > self.highest():
            replace_private_file(self._file, f"{version}\n")


class HeldFiles:
    """The held versions in one directory, which exists while there is one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(
        self, one: PublishedVersion, weights: HeldWeights
    ) -> tuple[PublishedVersion, HeldWeights]:
        """Store a version durably; return it as `read` does. Raises `ResourceExhausted` when it
        cannot be written."""
        self.begin(one, weights)
        return self.complete(one.weight_version)

    def begin(self, one: PublishedVersion, weights: HeldWeights) -> Path:
        """Write a version beside; if `weights` are its first segment, other ranks then write the
        rest into the returned file. Raises `ResourceExhausted`."""
        unfinished = self._unfinished(one.weight_version)
        with self._or_removed(one.weight_version):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            # Workers get the version whole, from this file, and no longer in segments.
            announcement = msgspec.structs.replace(one.announcement, segments=())
            about = _Published(announcement=announcement, published_unix_s=one.published_unix_s)
            _write(unfinished / _TENSORS, (tensor.data for tensor in weights.tensors))
            os.truncate(unfinished / _TENSORS, one.announcement.total_bytes)
            _write(unfinished / _MANIFEST, [weights.manifest])
            _write(unfinished / _PUBLISHED, [msgspec.json.encode(about)])
        return unfinished / _TENSORS

    def complete(self, version: int) -> tuple[PublishedVersion, HeldWeights]:
        """Make a version that was begun durable; return it as `read` does. Raises
        `ResourceExhausted`."""
        path, unfinished = self._path(version), self._unfinished(version)
        with self._or_removed(version):
            sync(unfinished)
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
            sync(self._directory)
        return _read(path)

    @contextmanager
    def _or_removed(self, version: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            shutil.rmtree(self._unfinished(version), ignore_errors=True)
            message = f"{self._path(version)}: {error.strerror or error}"
            raise ResourceExhausted(message) from error

    def read(self, version: int) -> tuple[PublishedVersion, HeldWeights]:
        """A stored version. Raises `DataLoss` without a complete and undamaged one."""
        return _read(self._path(version))

    def keep(self, versions: Collection[int]) -> None:
        """Remove all other versions."""
        wanted = {self._path(version).name for version in versions}
        for path in self._directory.glob(f"{_PREFIX}*"):
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)
        if not versions:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self._directory / f"{_PREFIX}{version:08d}"

    def _unfinished(self, version: int) -> Path:
        path = self._path(version)
        return path.with_name(path.name + _UNFINISHED)


def _read(path: Path) -> tuple[PublishedVersion, HeldWeights]:
    try:
        about = msgspec.json.decode((path / _PUBLISHED).read_bytes(), type=_Published)
        encoded = (path / _MANIFEST).read_bytes()
        manifest = about.announcement.open(encoded)
        tensors = tuple(_tensors(path / _TENSORS, manifest.tensors))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise DataLoss(f"{path} is not a held version: {error}") from error
    found = content_digest(map(TensorEntry.of, tensors))
    if found != about.announcement.digest:
        raise DataLoss(f"{path} is damaged: digest {found}, not {about.announcement.digest}")
    one = PublishedVersion(
        announcement=about.announcement, published_unix_s=about.published_unix_s, on_disk=True
    )
    return one, HeldWeights(tensors=tensors, manifest=encoded)


def _tensors(file: Path, entries: Collection[TensorEntry]) -> Iterator[NamedTensor]:
    """Raises `ValueError` for a file of another size."""
    size_bytes = sum(entry.size_bytes for entry in entries)
    with file.open("rb") as opened:
        found_bytes = os.fstat(opened.fileno()).st_size
        if found_bytes != size_bytes:
            raise ValueError(f"{file.name} has {found_bytes} bytes, not {size_bytes}")
        # An empty file cannot be mapped.
        data: memoryview = memoryview(b"")
        if size_bytes:
            data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    start = 0
    for entry in entries:
        end = start + entry.size_bytes
        yield NamedTensor(
            name=entry.name, dtype=entry.dtype, shape=entry.shape, data=data[start:end]
        )
        start = end


def _write(file: Path, parts: Iterator[bytes | memoryview] | list[bytes]) -> None:
    with file.open("wb") as opened:
        for part in parts:
            opened.write(part)
        opened.flush()
        os.fsync(opened.fileno())
