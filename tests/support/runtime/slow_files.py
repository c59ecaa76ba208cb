"""A file on a disk that is slow."""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class SlowFile:
    """Accepts its first 4 KiB, and the rest once that is read; `fsync` fails."""

    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened

    def await_write(self) -> None:
        """Wait until another process has written the beginning."""
        poll = select.poll()
        poll.register(self._opened, select.POLLIN)
        assert poll.poll(60_000), "nothing was written"

    def read(self) -> bytes:
        """All bytes, once the other process has closed the file."""
        os.set_blocking(self._opened.fileno(), True)
        return self._opened.read()


@contextmanager
def slow_file(path: Path) -> Iterator[SlowFile]:
    """Make the file at `path`, which must not exist."""
    os.mkfifo(path)
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(opened, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(opened, "rb") as file:
        yield SlowFile(file)
