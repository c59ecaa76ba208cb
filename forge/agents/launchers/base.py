"""The interface of launchers: `Launcher`, the `Request` that it gets, the `Program` that it starts.

Owns the part that all have: reading the answer. A launcher owns directories, network, limits and
the end of its programs; it does not know tasks, domains or rewards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from forge.agents.rollout import Gateway
from forge.runtime.concurrency.child_start import ChildProcess

OUTPUT_BYTES: Final = 64 << 10
"""Kept end of standard output, of standard error, and the longest answer file."""
ANSWER: Final = "answer"
"""Name of the answer file."""
_SIGNALLED: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """Limits of one program; 0: no limit. The rollout limits its time."""

    memory_bytes: int
    """Private writable memory of each process of the program (RLIMIT_DATA); of all together in a
    container and in a delegated control group."""
    processes: int
    """Processes and threads of the program; of its user without a container or a control group."""
    tmp_bytes: int = 1 << 30
    """Size of its /tmp, and of its /dev/shm. Not on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A program to start."""

    words: Sequence[str]
    variables: Mapping[str, str]
    """The gateway and the task."""
    inherited: Mapping[str, str]
    """Variables of the runner that describe its host, e.g. PATH."""
    passed: Sequence[str] = ()
    """Names of the inherited variables that a setting passes."""
    certificates: Mapping[str, str] = field(default_factory=dict)
    """PEM files of the host, by the variable that names them."""
    gateway: Gateway
    image: str = ""
    """Image of the task; "": the launcher's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A started program; the end of its context ends it."""

    process: ChildProcess
    answer: Callable[[], str]
    """Reads the answer file; "" without one."""
    wrapped: bool = True
    """The exit code is that of a wrapper, which adds 128 to the number of a signal."""
    over_limit: Callable[[], Awaitable[str]] | None = None
    """Returns words if a kill of it was its own fault: its limit on memory; else ""."""

    async def exceeded(self) -> str:
        """Returns the result of `over_limit`."""
        return "" if self.over_limit is None else await self.over_limit()

    @property
    def returncode(self) -> int | None:
        """Exit code; negative: the number of the signal that ended it; None: it runs."""
        code = self.process.returncode
        if self.wrapped and code is not None and code > _SIGNALLED:
            return _SIGNALLED - code
        return code


class Launcher(Protocol):
    """Starts programs; one instance serves all rollouts of a runner, concurrently."""

    async def check(self) -> None:
        """Raises `ConfigError` if this host cannot start programs so."""

    def start(self, request: Request) -> AbstractAsyncContextManager[Program]:
        """Starts a program. Raises `OSError` if its words or variables are too long, and
        `RuntimeError` with the reason if it cannot start."""

    async def close(self) -> None:
        """Frees all resources."""


def read_answer(directory: Path | int) -> str:
    """Returns the answer file of a directory, which a path or a descriptor names."""
    at, path = (directory, Path()) if isinstance(directory, int) else (None, directory)
    try:
        # A link of the program could lead to a file that only the runner may read.
        opened = os.open(path / ANSWER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    except OSError:
        return ""
    try:
        # Of a directory, fdopen raises and leaves the descriptor open.
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            return ""
        with os.fdopen(opened, "rb", closefd=False) as file:
            return file.read(OUTPUT_BYTES).decode(errors="replace").strip()
    finally:
        os.close(opened)
