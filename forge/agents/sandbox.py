"""Runs a model's Python program in a short-lived process of its own, within limits.

Owns the process and what contains it, outermost first:
- a deadline, after which the whole process group is killed;
- where the kernel lets us, namespaces of its own: no network, and no process outlives the run;
- resource limits: CPU time, memory, processes, file size; output is cut off by its reader;
- an audit hook that refuses everything a calculation does not need: writing, sockets, processes.
The hook stops accidents, not a determined attacker: programs of people one does not trust belong
on a host of their own. Owns no wording of results for models; that is the domain's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from forge.agents.child import kill_group

_UNSHARE: Final = (
    "unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child=KILL",
)  # fmt: skip

# Starting Python without `site` takes 6 ms: cheap enough for a process per run, which needs no
# trust in the program that ran before.
_PRELUDE: Final = """
import resource, sys
cpu_s, memory, processes, file = map(int, sys.argv[1:])
for kind, limit in (
    (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_FSIZE, file),
):
    resource.setrlimit(kind, (limit, limit))
program = sys.stdin.buffer.read().decode()
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
class Limits:
    """What one program may use."""

    wall_s: float = 4.0
    cpu_s: int = 2
    memory_bytes: int = 256 << 20
    """Address space, the interpreter's own 20 MiB included."""
    processes: int = 0
    """Further processes and threads; not enforced by the kernel for root."""
    file_bytes: int = 0
    output_bytes: int = 64 << 10
    """Standard output and standard error, each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended."""

    output: str
    """What it printed, up to the limit, also when it failed."""
    error: str
    """One line: what it raised, or which limit ended it; "" for success."""
    wall_s: float


class Sandbox:
    """Runs at most `concurrency` programs at once; further ones wait their turn."""

    def __init__(self, limits: Limits | None = None, *, concurrency: int = 0) -> None:
        """`concurrency` 0 means one per core."""
        self._limits = limits or Limits()
        self._concurrency = concurrency or os.cpu_count() or 1
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._wrapper: tuple[str, ...] | None = None

    async def run(self, program: str) -> Outcome:
        """Run it to its end, or to a limit."""
        async with self._slot():
            if self._wrapper is None:
                self._wrapper = await _namespaces()
            started_s = time.monotonic()
            process = await self._start(self._wrapper)
            try:
                output, error = await self._finish(process, program.encode(errors="replace"))
            finally:
                kill_group(process)
                await process.wait()
        return Outcome(output=output, error=error, wall_s=time.monotonic() - started_s)

    def _slot(self) -> asyncio.Semaphore:
        # A semaphore belongs to one loop, a sandbox may be shared by several in turn.
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._concurrency))
        return self._slots[1]

    async def _start(self, wrapper: tuple[str, ...]) -> Process:
        limits = self._limits
        numbers = (limits.cpu_s, limits.memory_bytes, limits.processes, limits.file_bytes)
        return await asyncio.create_subprocess_exec(
            *wrapper,
            *(sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _PRELUDE),
            *map(str, numbers),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )

    async def _finish(self, process: Process, program: bytes) -> tuple[str, str]:
        """Output and error of the started process."""
        assert process.stdin and process.stdout and process.stderr
        output, errors = bytearray(), bytearray()
        try:
            async with asyncio.timeout(self._limits.wall_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(_feed(process.stdin, program))
                for stream, into in ((process.stdout, output), (process.stderr, errors)):
                    tasks.create_task(self._read(process, stream, into))
                tasks.create_task(process.wait())
        except TimeoutError:
            error = f"TimeoutError: no end after {self._limits.wall_s:g} s"
        else:
            error = self._complaint(process, output, errors)
        return output[: self._limits.output_bytes].decode(errors="replace"), error

    async def _read(self, process: Process, stream: asyncio.StreamReader, into: bytearray) -> None:
        while piece := await stream.read(1 << 16):
            into += piece
            if len(into) > self._limits.output_bytes:
                kill_group(process)
                return

    def _complaint(self, process: Process, output: bytearray, errors: bytearray) -> str:
        if max(len(output), len(errors)) > self._limits.output_bytes:
            return f"OutputError: more than {self._limits.output_bytes} bytes"
        if process.returncode == 0:
            return ""
        lines = errors.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the program was ended: status {process.returncode}"


async def _feed(stdin: asyncio.StreamWriter, program: bytes) -> None:
    # A process that a limit ended early reads no more.
    with suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(program)
        await stdin.drain()
    stdin.close()


async def _namespaces() -> tuple[str, ...]:
    """The command that gives a process namespaces of its own; () where that is not allowed."""
    if shutil.which(_UNSHARE[0]) is None:
        return ()
    probe = await asyncio.create_subprocess_exec(
        *_UNSHARE, "true", stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
    )
    return _UNSHARE if await probe.wait() == 0 else ()


SANDBOX: Final = Sandbox()
"""Shared, so that its bound holds for all rollouts of a process together."""
