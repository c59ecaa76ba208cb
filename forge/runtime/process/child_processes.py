"""Child processes: starts them, restarts them with back-off, stops them in order.

No child outlives this process, not even after SIGKILL. Every crash is one `ProcessEvent` with one
line of text. Knows nothing of the services.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge.core.errors import ConfigError, FailedPrecondition
from forge.runtime.actors.supervision import Restart, RestartBudget
from forge.runtime.process.startup import CANNOT_START

__all__ = ["ProcessEvent", "ProcessSpec", "ProcessSupervisor", "Restart", "dying_with_parent"]

_TAIL_BYTES = 16_384
_LAST_WILL = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else it has died before the request was made
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """Specification of one child process."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    """The whole environment of the child."""
    log_path: Path
    """Gets stdout and stderr, appended."""
    restart: Restart = field(default_factory=Restart)
    """Applies to crashes; a child that exits with 0 is not restarted."""
    stop_s: float = 20.0
    """Time between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvent:
    """A change in the life of a child."""

    name: str
    kind: Literal["started", "crashed", "gave_up", "ended", "stopped", "killed"]
    """crashed: a restart follows; gave_up: no restart; killed: SIGTERM did not stop it."""
    pid: int
    cause: str = ""
    """"exit code 1" or "SIGKILL"; "" while it runs."""
    last_line: str = ""
    """Last line of its log, at a crash."""
    restart_in_s: float = 0.0

    @property
    def line(self) -> str:
        """The event in one line."""
        said = f": {self.last_line}" if self.last_line else ""
        match self.kind:
            case "crashed":
                return (
                    f"{self.name} crashed ({self.cause}), "
                    f"restart in {self.restart_in_s:.1f} s{said}"
                )
            case "gave_up" if self.cause == _cause(CANNOT_START):
                return f"{self.name} cannot start{said}"
            case "gave_up":
                return f"{self.name} keeps crashing ({self.cause}), giving up{said}"
            case "killed":
                return f"{self.name} did not stop when asked to and was killed"
            case _:
                return f"{self.name} {self.kind}"


class ProcessSupervisor:
    """The children of this process. Used from one event loop, on the main thread."""

    def __init__(self, *, on_event: Callable[[ProcessEvent], None]) -> None:
        self._on_event = on_event
        self._children: dict[str, _Child] = {}

    async def start(self, spec: ProcessSpec) -> None:
        """Start a child and keep it running. Raises ConfigError when its program is missing."""
        if spec.name in self._children:
            raise FailedPrecondition(f"there is a child {spec.name} already")
        child = _Child(spec, self._on_event)
        await child.start()
        self._children[spec.name] = child

    async def stop(self) -> None:
        """Stop all, the youngest first: SIGTERM, then SIGKILL after `stop_s`. A cancel kills the
        remaining ones at once."""
        try:
            while self._children:
                await next(reversed(self._children.values())).stop()
                self._children.popitem()
        except asyncio.CancelledError:
            # Reaped before the event loop closes: asyncio prints a warning for later ends.
            await asyncio.gather(*(child.kill() for child in self._children.values()))
            self._children.clear()
            raise

    def pids(self) -> dict[str, int]:
        """Process ids of the running children."""
        return {name: child.pid for name, child in self._children.items() if child.running}


class _Child:
    """One child through all its restarts."""

    def __init__(self, spec: ProcessSpec, on_event: Callable[[ProcessEvent], None]) -> None:
        self._spec = spec
        self._on_event = on_event
        self._budget = RestartBudget(spec.restart)
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        self._process = await self._spawn()
        self._task = asyncio.create_task(self._supervise(), name=f"child-{self._spec.name}")

    async def stop(self) -> None:
        assert self._task is not None
        self._stopping.set()
        if self._process is not None and self.running:
            self._process.terminate()
        done, _ = await asyncio.wait({self._task}, timeout=self._spec.stop_s)
        if not done:
            self._tell("killed")
            await self.kill()

    async def kill(self) -> None:
        assert self._task is not None
        self._stopping.set()
        if self._process is not None and self.running:
            self._process.kill()
        await self._task

    async def _spawn(self) -> asyncio.subprocess.Process:
        spec = self._spec
        program = shutil.which(spec.argv[0], path=spec.env.get("PATH", os.defpath))
        if program is None:
            raise ConfigError(f"{spec.name} cannot be started: there is no program {spec.argv[0]}")
        try:
            spec.log_path.parent.mkdir(parents=True, exist_ok=True)
            with spec.log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *dying_with_parent([program, *spec.argv[1:]]),
                    env=dict(spec.env),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C reaches the parent alone, which stops the children in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"{spec.log_path}: {error.strerror}") from None
        self._on_event(ProcessEvent(name=spec.name, kind="started", pid=process.pid))
        return process

    async def _supervise(self) -> None:
        assert self._process is not None
        started_before = False
        while True:
            code = await self._process.wait()
            if self._stopping.is_set():
                self._tell("stopped")
                return
            if code == 0:
                self._tell("ended")
                return
            delay_s = self._budget.backoff_s(time.monotonic())
            # After a first run, the port or the disk may still be busy for a moment.
            if delay_s is None or (code == CANNOT_START and not started_before):
                self._tell("gave_up")
                return
            self._tell("crashed", restart_in_s=delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            if self._stopping.is_set():
                return
            started_before = True
            try:
                self._process = await self._spawn()
            except ConfigError as error:
                self._tell("gave_up", last_line=str(error))
                return
            if self._stopping.is_set():
                # `stop` came while no process ran.
                self._process.terminate()

    def _tell(
        self,
        kind: Literal["crashed", "gave_up", "ended", "stopped", "killed"],
        *,
        restart_in_s: float = 0.0,
        last_line: str = "",
    ) -> None:
        crashed = kind in ("crashed", "gave_up")
        code = self._process.returncode if self._process is not None else None
        event = ProcessEvent(
            name=self._spec.name,
            kind=kind,
            pid=self.pid,
            cause=_cause(code),
            last_line=last_line or (_last_line(self._spec.log_path) if crashed else ""),
            restart_in_s=restart_in_s,
        )
        self._on_event(event)


def dying_with_parent(argv: Sequence[str]) -> list[str]:
    """Return the command with a prefix: the kernel kills the child when this process dies.

    The prefix is a Python process that calls prctl and then becomes the program (15 ms). Code
    between fork and exec could deadlock, because this process has threads.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _LAST_WILL, str(os.getpid()), *argv]


def _cause(code: int | None) -> str:
    if code is None:
        return ""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _last_line(path: Path) -> str:
    """Return the last line of a log; of a JSON line the event and its error."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return ""
    # Go programs such as etcd write their stack after the message.
    panic = next((at for at, line in enumerate(lines) if line.startswith("panic: ")), None)
    last = next((line for line in reversed(lines[:panic] or lines) if line), "")
    try:
        fields = json.loads(last)
        said = [str(fields[key]) for key in ("event", "msg", "error") if fields.get(key)]
        return ": ".join(said) or last
    except (ValueError, AttributeError, TypeError):
        return last
