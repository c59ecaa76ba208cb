"""Locks on a shard's files, and the exchange of its data file.

A service, or a tool that changes the shard, locks the directory; a tool that reads locks the data
file, shared.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.core.errors import ConfigError, FailedPrecondition
from forge.runtime.files.sync import sync

DATA, LOCK = "data.mdb", "lock.mdb"
_COMPACTED = "compacted"
_HAND_OVER = "takes_over"


class InUse(ConfigError):
    """Another process has the directory."""


def lock_directory(directory: Path) -> int:
    """An open descriptor of `directory`, locked until it is closed or the process ends.

    Raises `ConfigError` when it cannot be used, `InUse` when another process has it.
    """
    try:
        if not directory.exists():
            directory.mkdir(parents=True)
            sync(directory.parent)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"data_dir {directory} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InUse(f"data_dir {directory} is in use by another pool instance") from None
    return descriptor


@contextmanager
def data_kept(directory: Path) -> Iterator[None]:
    """Keeps the data file from being exchanged; every LMDB reader must hold it.

    Waits for an exchange in progress, which is short. Raises `FileNotFoundError` if there is no
    data file.
    """
    while True:
        descriptor = os.open(directory / DATA, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # The file may have been exchanged between open and lock.
            if os.path.samestat(os.fstat(descriptor), (directory / DATA).stat()):
                yield
                return
        finally:
            os.close(descriptor)


@contextmanager
def data_locked(
    directory: Path, *, wait_s: float = 0.0, stopped: threading.Event | None = None
) -> Iterator[None]:
    """Keeps `data_kept` from being entered. Waits up to `wait_s` for its holders, unless `stopped`.

    Raises `FailedPrecondition` if there still are any.
    """
    until_s = time.monotonic() + wait_s
    descriptor = os.open(directory / DATA, os.O_RDONLY)
    try:
        while not _locked_alone(descriptor):
            if time.monotonic() >= until_s or (stopped is not None and stopped.wait(0.1)):
                raise FailedPrecondition(
                    f"{directory} is being read by another process, such as a check or a backup: "
                    "compact it when that is done"
                )
        yield
    finally:
        os.close(descriptor)


def _locked_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def exchange_data(directory: Path, copy: Path) -> None:
    """Replaces the data file of `directory` by that of `copy`.

    Both are closed and on disk, and the caller is within `data_locked`. LMDB's lock file goes
    first: it names a newer transaction than any of the copy's. A crash leaves one file or the
    other.
    """
    (directory / LOCK).unlink(missing_ok=True)
    (copy / DATA).replace(directory / DATA)
    sync(directory)


def set_hand_over_mark(directory: Path) -> None:
    """From now on the store in `directory` may take over the name of its shard."""
    (directory / _HAND_OVER).touch()
    sync(directory)


def has_hand_over_mark(directory: Path) -> bool:
    """Whether the store may take over the name."""
    return (directory / _HAND_OVER).exists()


def remove_hand_over_mark(directory: Path) -> None:
    """Removes the mark once the store has the name."""
    (directory / _HAND_OVER).unlink(missing_ok=True)


def compacted(directory: Path) -> Path:
    """Directory of a copy that will replace the data file."""
    return directory / _COMPACTED


def unfinished(copy: Path) -> Path:
    """Name of a copy until it is complete and on disk."""
    return copy.with_name(f".{copy.name}.unfinished")


def drop_compacted(directory: Path) -> None:
    """Removes the copy, finished or not."""
    for copy in (compacted(directory), unfinished(compacted(directory))):
        shutil.rmtree(copy, ignore_errors=True)


def file_bytes(path: Path) -> int:
    """Size of a file; 0 if it is absent."""
    return path.stat().st_size if path.exists() else 0
