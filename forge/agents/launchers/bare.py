"""Programs on the host, with resource limits and no sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE

from forge.agents.launchers.base import ANSWER, Program, ProgramLimits, Request, read_answer
from forge.agents.sandbox.child import end_group, start_turn
from forge.runtime.concurrency import child_start

# Sets the limits in the program's process and then executes the program: Python code between fork
# and exec would be unsafe in a process with threads. The program ends with the runner.
_START = """
import ctypes, os, resource, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() != int(sys.argv[3]):
    sys.exit("the runner is gone")
kinds = (resource.RLIMIT_DATA, resource.RLIMIT_NPROC)
for kind, limit in zip(kinds, map(int, sys.argv[1:3])):
    if limit:
        resource.setrlimit(kind, (limit, limit))
os.execvp(sys.argv[4], sys.argv[4:])
"""


class BareLauncher:
    """Starts programs as children of the runner: they read and write what its user can."""

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits

    async def check(self) -> None:
        """Returns: every host can start programs so."""

    @asynccontextmanager
    async def start(self, request: Request) -> AsyncIterator[Program]:
        """Starts a program in a directory of its own."""
        directory = Path(tempfile.mkdtemp(prefix="forge-rollout-"))
        settings = (self._limits.memory_bytes, self._limits.processes, os.getpid())
        places = {"TMPDIR": str(directory), "FORGE_ANSWER": str(directory / ANSWER)}
        environment = {**request.inherited, **request.variables, **request.certificates, **places}
        try:
            async with start_turn():
                process = await child_start.start(
                    *(
                        sys.executable,
                        "-I",
                        "-S",
                        "-c",
                        _START,
                        *map(str, settings),
                        *request.words,
                    ),
                    env=environment,
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=PIPE,
                    start_new_session=True,
                )
            try:
                yield Program(
                    process=process, answer=partial(read_answer, directory), wrapped=False
                )
            finally:
                await end_group(process)
        finally:
            # In a thread: a program may have written gigabytes.
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def close(self) -> None:
        """As `Launcher.close`: nothing to free."""
