"""Files and directories on disk, beyond a loss of power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Write a file, or the names in a directory, to disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def errors_named(path: str | Path) -> Iterator[None]:
    """Names a file in an `OSError` that names none, as those of an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
