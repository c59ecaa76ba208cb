"""A file for its owner alone, for keys and tokens."""

from __future__ import annotations

import os
from pathlib import Path


def write_private_file(path: str | Path, text: str) -> None:
    """Write a new file durably, with mode 0600. Raises OSError; FileExistsError for a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
