"""A child process in a group of its own: ending all of it, and keeping the end of what it prints.

Owns what every kind of child here shares: agents' programs, model-written programs and reward
functions. What a child is for, and which limits it has, is its starter's business.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from contextlib import suppress


def kill_group(process: Process) -> None:
    """End the process and everything it started. It must lead a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def how_it_ended(returncode: int) -> str:
    """In words: "ended with 1" or "was killed by SIGSEGV"."""
    if returncode >= 0:
        return f"ended with {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"


def killed_from_outside(returncode: int | None) -> bool:
    """Whether a child that its runner has not killed got SIGKILL: the kernel sends it where the
    host's memory runs out. A child's own limits end it in other ways."""
    return returncode == -signal.SIGKILL


class Tail:
    """The last bytes of a stream that somebody must read, or its writer would block."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept = b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read to the end of the stream."""
        while piece := await stream.read(1 << 16):
            self._kept = (self._kept + piece)[-self._limit_bytes :]

    def clear(self) -> None:
        """Forget what was read so far."""
        self._kept = b""

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


def last_lines(text: str, *, chars: int) -> list[str]:
    """The last lines that are not blank, as many as fit into `chars`; at least one, cut to fit."""
    kept: list[str] = []
    for line in reversed(text.splitlines()):
        line = line.rstrip()
        if not line.strip():
            continue
        chars -= len(line) + 1
        if chars < 0 and kept:
            break
        kept.append(line if chars >= 0 else line[: chars - 1])
        if chars < 0:
            break
    return kept[::-1]
