"""A write of many bytes at an offset of a file."""

from __future__ import annotations

import os

_PIECE_BYTES = 1 << 24


def write_at(opened: int, data: bytes | memoryview, start: int) -> None:
    """Write all bytes at offset `start` of the descriptor `opened`. Raises OSError.

    Not through a mapping: a page fault of that copy would hold the interpreter, which other threads
    need.
    """
    view, done = memoryview(data).cast("B"), 0
    while done < view.nbytes:
        done += os.pwrite(opened, view[done : done + _PIECE_BYTES], start + done)
