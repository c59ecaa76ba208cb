"""Child processes, each in its own process group: environment, termination, last lines of output.

Owns the common part of agents' programs, model-written programs and reward functions. Owns no
limits: the callers set them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

from forge.runtime.concurrency.child_start import ChildProcess

PASSED: Final = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "TZ", "TMPDIR"),
        *("NO_PROXY", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"),
        *("PYTHONPATH", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
    )
)
"""Variables that each child gets, with LC_*: they have no secrets."""


def clean_environment(extra: Collection[str]) -> dict[str, str]:
    """Returns the runner's variables without its secrets: `PASSED` and `extra` only."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name[:3] == "LC_" or name in extra
    }


def start_turn() -> asyncio.Lock:
    """Returns the lock that the start of a child holds: one start at a time in an event loop.

    A start blocks its loop for milliseconds, on an overloaded host for longer. Starts of a hundred
    rollouts in a row would hold up the leases and requests of all others.
    """
    return _START_TURNS.setdefault(asyncio.get_running_loop(), asyncio.Lock())


_START_TURNS: Final = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


def kill_group(process: ChildProcess) -> None:
    """Kills the process and all its children. It must be the leader of its own session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def end_group(process: ChildProcess) -> None:
    """Kills as `kill_group` and waits for the process."""
    kill_group(process)
    await process.wait()


def how_it_ended(returncode: int) -> str:
    """Returns "ended with 1" or "was killed by SIGSEGV"."""
    if returncode >= 0:
        return f"ended with {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"


def killed_from_outside(returncode: int | None) -> bool:
    """Returns True after a SIGKILL, for a child that the runner has not killed: the kernel sends it
    when the host is out of memory. Limits of the child end it in other ways."""
    return returncode == -signal.SIGKILL


class OutputTail:
    """The last bytes of a child's output, read continuously so that the child never blocks."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept = b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Reads to the end of the stream."""
        while piece := await stream.read(1 << 16):
            self._kept = (self._kept + piece)[-self._limit_bytes :]

    def clear(self) -> None:
        """Drops the bytes read so far."""
        self._kept = b""

    @property
    def text(self) -> str:
        """The last bytes as text."""
        return self._kept.decode(errors="replace")


def last_lines(text: str, *, chars: int) -> list[str]:
    """Returns the last lines that are not blank, at most `chars` long; at least one, cut to fit."""
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


def last_line(output: bytes, *, chars: int, otherwise: str) -> str:
    """Returns the last line that is not blank, cut to `chars`; `otherwise` without one."""
    return (last_lines(output.decode(errors="replace"), chars=chars) or [otherwise])[-1]
