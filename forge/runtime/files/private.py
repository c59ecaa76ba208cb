"""A file for its owner alone, for keys and tokens."""

from __future__ import annotations

import os
from pathlib import Path

from forge.runtime.files.sync import sync


def replace_private_file(path: str | Path, text: str) -> None:
    """Replace a file durably, with mode 0600; a reader sees the old or the new text.

    Raises OSError.
    """
    new = Path(f"{path}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    try:
        write_private_file(new, text)
        new.replace(path)
        sync(new.parent)
    finally:
        new.unlink(missing_ok=True)


def write_private_file(path: str | Path, text: str) -> None:
    """Write a new file durably, with mode 0600. Raises OSError; FileExistsError for a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
