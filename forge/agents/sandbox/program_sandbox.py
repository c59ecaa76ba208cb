"""Runs a model's Python program in a short-lived process, within limits.

Owns the process and its containment, outermost first:
- a deadline in own time (`own_time`), after which the process group is killed;
- bubblewrap (`bubblewrap`): its own root, no network, no other process, never root;
- resource limits: CPU time, memory, no written byte; its reader limits the output;
- an audit hook that refuses everything a calculation does not need: writing, sockets, processes;
- a `time.sleep` with a limit on the total.
The limit is CPU time, which is equal on every host: on an overloaded host a program takes longer
and still succeeds. The deadline ends programs that wait forever.
The hook names the mistake for the model; the kernel stops attacks. Without bubblewrap, programs run
only if `unsafe` is set. Owns no wording of results for models; the domain does.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from subprocess import PIPE
from typing import Final

from forge.agents.sandbox import bubblewrap, seccomp
from forge.agents.sandbox.bubblewrap import Bubblewrap
from forge.agents.sandbox.child import end_group, kill_group, start_turn
from forge.agents.sandbox.control_groups import CONTROL_GROUPS, ControlGroup
from forge.agents.sandbox.own_time import OutOfTime, within
from forge.core.errors import FailedPrecondition
from forge.runtime.concurrency import child_start
from forge.runtime.concurrency.child_start import ChildProcess

WRAPPER_BYTES: Final = 64 << 20
"""Memory of bubblewrap, and of the kernel for the sandbox, in its control group."""
PROCESSES: Final = 8
"""Processes in its control group; two are bubblewrap's."""

# Starting Python without `site` takes 6 ms: cheap enough for a process per run, which needs no
# trust in the program that ran before. Importing `signal` in place of `_signal` would double that.
_PRELUDE: Final = """
import _signal, posix, resource, sys, time
cpu_s, sleep_s, memory, user = map(int, sys.argv[1:])
for kind, limit in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
    (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 64),
):
    resource.setrlimit(kind, (limit, limit))
if user and posix.getuid() == 0:
    posix.setgroups([])
    posix.setresgid(user, user, user)
    posix.setresuid(user, user, user)
def late(number, frame):
    raise TimeoutError(f"more than {cpu_s} s of CPU time")
_signal.signal(_signal.SIGXCPU, late)
# A program that catches the error has a second left.
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
# The program comes after this byte: the kernel ends a process that sent it with the runner.
posix.write(1, b"+")
program = sys.stdin.buffer.read().decode()
left_s = sleep_s
def sleep(seconds, sleep=time.sleep):
    global left_s
    left_s -= max(0.0, seconds)
    if left_s < 0:
        raise TimeoutError(f"more than {sleep_s} s of sleep")
    sleep(seconds)
time.sleep = sleep
allowed = frozenset((
    "builtins.id", "builtins.input", "builtins.input/result", "code.__new__", "compile", "exec",
    "import", "marshal.loads", "object.__delattr__", "object.__getattr__", "object.__setattr__",
    "os.listdir", "os.scandir", "sys._getframe", "time.sleep",
))
def audit(event, arguments):
    if event in allowed:
        return
    if event == "open" and not arguments[2] & 3 and (arguments[1] or "r") in ("r", "rb"):
        return
    raise PermissionError(f"{event} is not allowed here")
sys.argv = ["program"]
sys.addaudithook(audit)
try:
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
except Exception as error:
    sys.stdout.flush()
    sys.stderr.write(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one program."""

    cpu_s: int = 2
    sleep_s: int = 2
    """Sum of the arguments of all `time.sleep` calls."""
    wall_s: float = 60.0
    """Own time. Reached only by programs that wait: CPU time and sleep have lower limits."""
    memory_bytes: int = 256 << 20
    """Address space, including 20 MiB of the interpreter."""
    output_bytes: int = 64 << 10
    """For standard output and for standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Output and error of a program."""

    output: str
    """Standard output up to the limit, also of a failed program."""
    error: str
    """One line: the exception, or the limit that ended the program; "" for success."""


class Sandbox:
    """Runs at most one program per core at once; more have to wait."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.unsafe = False
        """Run programs without bubblewrap on a host that lacks it."""
        self._limits = limits or SandboxLimits()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._wrapper: Bubblewrap | None = None
        self._problem: str | None = None

    async def run(self, program: str) -> ProgramResult:
        """Runs the program to its end, or to a limit. Raises `FailedPrecondition` on a host without
        bubblewrap, unless `unsafe` is set."""
        async with self._slot():
            if (problem := await self.problem()) and not self.unsafe:
                raise FailedPrecondition(problem)
            return await self._run(program, wall_s=self._limits.wall_s)

    async def problem(self) -> str:
        """Returns one line with the remedy if this host cannot run the sandbox; "" if it can."""
        if self._problem is None:
            try:
                self._wrapper = bubblewrap.find()
                result = await self._run("", wall_s=min(self._limits.wall_s, bubblewrap.PROBE_S))
                reason = result.error
            except FailedPrecondition as error:
                reason = str(error)
            if reason:
                self._wrapper = None
            self._problem = (
                reason and f"no sandbox for programs of models: {reason}; {bubblewrap.remedy()}"
            )
        return self._problem

    async def _run(self, program: str, *, wall_s: float) -> ProgramResult:
        memory_bytes = self._limits.memory_bytes + WRAPPER_BYTES
        with CONTROL_GROUPS.group(memory_bytes=memory_bytes, processes=PROCESSES) as group:
            process = await self._start(group)
            try:
                output, error = await self._finish(
                    process, program.encode(errors="replace"), wall_s=wall_s
                )
            finally:
                await end_group(process)
        return ProgramResult(output=output, error=error)

    def _slot(self) -> asyncio.Semaphore:
        # A semaphore belongs to one event loop, but several loops may use a sandbox in succession.
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(os.cpu_count() or 1))
        return self._slots[1]

    async def _start(self, group: ControlGroup) -> ChildProcess:
        limits, wrapper = self._limits, self._wrapper
        user = bubblewrap.UNPRIVILEGED_ID if wrapper else 0
        numbers = (limits.cpu_s, limits.sleep_s, limits.memory_bytes, user)
        filtered = seccomp.filter_file(wrapper.system_calls) if wrapper else nullcontext(-1)
        async with start_turn():
            with filtered as system_calls:
                return await child_start.start(
                    *group.words,
                    *((*wrapper.words, "--seccomp", str(system_calls)) if wrapper else ()),
                    *(bubblewrap.interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", _PRELUDE),
                    *map(str, numbers),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    env={},
                    cwd="/",
                    start_new_session=True,
                    pass_fds=(system_calls,) if wrapper else (),
                )

    async def _finish(
        self, process: ChildProcess, program: bytes, *, wall_s: float
    ) -> tuple[str, str]:
        """Returns output and error of the started process."""
        output, errors = bytearray(), bytearray()
        try:
            await within(wall_s, self._exchange(process, program, output, errors))
        except OutOfTime:
            error = f"TimeoutError: no end after {wall_s:g} s"
        else:
            error = self._complaint(process, output, errors)
        return output[: self._limits.output_bytes].decode(errors="replace"), error

    async def _exchange(
        self, process: ChildProcess, program: bytes, output: bytearray, errors: bytearray
    ) -> None:
        """Sends the program and reads its output to the end."""
        assert process.stdin and process.stdout and process.stderr
        async with asyncio.TaskGroup() as tasks:
            # Without the byte, standard error has the reason.
            if await process.stdout.read(1):
                tasks.create_task(_feed(process.stdin, program))
            for stream, into in ((process.stdout, output), (process.stderr, errors)):
                tasks.create_task(self._read(process, stream, into))
            tasks.create_task(process.wait())

    async def _read(
        self, process: ChildProcess, stream: asyncio.StreamReader, into: bytearray
    ) -> None:
        while piece := await stream.read(1 << 16):
            into += piece
            if len(into) > self._limits.output_bytes:
                kill_group(process)
                return

    def _complaint(self, process: ChildProcess, output: bytearray, errors: bytearray) -> str:
        if max(len(output), len(errors)) > self._limits.output_bytes:
            return f"OutputError: more than {self._limits.output_bytes} bytes"
        if process.returncode == 0:
            return ""
        lines = errors.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the program was ended: status {process.returncode}"


async def _feed(stdin: asyncio.StreamWriter, program: bytes) -> None:
    # A limit may end the process before it has read everything.
    with suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(program)
        await stdin.drain()
    stdin.close()


SANDBOX: Final = Sandbox()
"""Shared by all rollouts of a process, so its bound holds for all of them together."""
