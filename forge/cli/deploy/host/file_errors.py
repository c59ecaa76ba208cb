"""Errors of the files of a host."""

from __future__ import annotations

import errno
from pathlib import Path

from forge.core.errors import InvalidArgument


def file_error(error: OSError, file: Path | None = None) -> InvalidArgument:
    """The error with its file; with the remedy, if only root may. `file`: for an error that names
    none."""
    remedy = "; run it as root" if error.errno in (errno.EACCES, errno.EPERM) else ""
    return InvalidArgument(f"{error.filename or file}: {error.strerror}{remedy}")
