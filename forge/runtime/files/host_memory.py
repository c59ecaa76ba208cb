"""The memory that processes of one host and one user share as files, without network."""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def place() -> str:
    """Return a name of this host's memory and of this user in it; "" without such memory.

    Equal names: the processes see the same directory and open each other's files.
    """
    try:
        found = DIRECTORY.stat()
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        return ""
    return f"{boot_id}/{found.st_dev}/{found.st_ino}/{os.geteuid()}"
