"""A file for its owner alone, for keys and tokens: complete under its name, or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.runtime.files.sync import errors_named, sync


def replace_private_file(path: str | Path, text: str) -> None:
    """Replace a file durably, with mode 0600; a reader sees the old or the new text.

    Raises OSError.
    """
    with _written_beside(path, text) as new:
        new.replace(path)


def write_private_file(path: str | Path, text: str) -> None:
    """Write a new file durably, with mode 0600. Raises OSError; FileExistsError for a file."""
    # Also in a directory in which nothing may be written.
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with _written_beside(path, text) as new:
        try:
            os.link(new, path)
        except FileExistsError:
            raise
        except OSError:
            # A file system without hard links.
            _write(path, text)


@contextmanager
def _written_beside(path: str | Path, text: str) -> Iterator[Path]:
    """Writes a file for the length of a block, which gives it its name."""
    new = Path(f"{path}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    try:
        with errors_named(path):
            _write(new, text)
        yield new
        sync(new.parent)
    finally:
        new.unlink(missing_ok=True)


def _write(path: str | Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
