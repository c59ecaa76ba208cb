"""The lock of a rendered directory: one command at a time changes it and its hosts."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.core.errors import FailedPrecondition, InvalidArgument

LOCK = "lock"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other commands from a directory of `forge deploy render` and its hosts.

    Raises `FailedPrecondition` while one has it, `InvalidArgument` without the directory.
    """
    try:
        lock = (out / LOCK).open("a+")
    except OSError as error:
        raise InvalidArgument(
            f"{out}: {error.strerror}; name the --out of forge deploy render"
        ) from None
    with lock:
        try:
            # The kernel frees it when the process ends, also by kill -9.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise FailedPrecondition(
                f"{out} is in use by another forge deploy, process {lock.read().strip()}: "
                "this one has changed nothing; repeat it once that one has ended"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
