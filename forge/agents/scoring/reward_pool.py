"""Runs reward functions in worker processes, within limits.

Owns the workers: a bounded number, started on demand, reused for every function, and killed with
their children after a timeout, a crash or a cancelled call. Reward functions are untrusted code: a
failure affects the scored rollout, never the runner.

An earlier call may leave a worker in a bad state, for example without memory. A call that fails so
is repeated once in a new process; any other failure is final and raises `RewardError`. The attempt
fails then, and the scheduler repeats it within its limit. A process that the host kills, because
memory is exhausted, raises `ResourceExhausted`, which does not count against the task.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields
from subprocess import PIPE
from typing import Any, Final

import msgspec

from forge.agents.environments.base import Reward, Transcript
from forge.agents.rewards import RewardTask
from forge.agents.sandbox.bubblewrap import UNPRIVILEGED_ID, remedy
from forge.agents.sandbox.child import (
    OutputTail,
    clean_environment,
    end_group,
    how_it_ended,
    killed_from_outside,
    last_lines,
)
from forge.agents.sandbox.control_groups import CONTROL_GROUPS, ControlGroup
from forge.agents.sandbox.own_time import OutOfTime, within
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.scoring.reward_worker import LENGTH_BYTES, framed
from forge.core.errors import ConfigError, ForgeError, ResourceExhausted
from forge.runtime.concurrency import child_start
from forge.runtime.concurrency.child_start import ChildProcess
from forge.runtime.telemetry import counter, histogram, log

LOAD_S: Final = 120.0
"""Time limit to start a process and import a function."""
ANSWER_BYTES: Final = 1 << 20
"""Size limit of one answer; a larger one is invalid."""
STDERR_BYTES: Final = 8 << 10
LAST_LINES_S: Final = 1.0
"""Time limit to read the output of a dead process: a child outside its group may keep it open."""
LOGGED_CHARS: Final = 2000
SIGNALLED: Final = 128
"""bubblewrap's exit code for a process ended by a signal, less the signal's number."""

_CALLS = histogram(
    "forge_runner_reward_seconds",
    "Time of one call of a reward function, with the wait for a free process.",
)
_FAILURES = counter(
    "forge_runner_reward_failures_total", "Failed calls of reward functions.", ["cause"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLimits:
    """Limits of one call and its process; for memory and processes, 0 means no limit."""

    call_s: float
    memory_bytes: int
    """Private writable memory of each of its processes (RLIMIT_DATA)."""
    processes: int
    """All processes and threads of the runner's user (RLIMIT_NPROC)."""


class RewardError(ForgeError):
    """A reward function failed; the message has the function and the reason."""


class _CallResult(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    call: int
    """Number of the call; missing in bytes that a function wrote to the pipe itself."""
    rewards: list[Reward] = []
    error: str = ""
    cause: str = ""


class _Died(Exception):
    """The process has given no valid answer: it ended; the message has the details."""

    cause = "died"


class _Killed(_Died):
    """The host killed the process."""

    cause = "killed"


class _Timeout(_Died):
    """The time limit of a call is reached."""

    cause = "timeout"


class _Retryable(Exception):
    """The call failed in a process with earlier calls; a new process may succeed."""


class RewardPool:
    """The reward functions of one runner, by domain."""

    def __init__(
        self,
        functions: Mapping[str, str],
        *,
        limits: RewardLimits,
        workers: int = 0,
        pass_environment: Collection[str] = (),
        sandbox: ProcessSandbox | None = None,
        unsafe: bool = False,
    ) -> None:
        """`functions`: "module:function" by domain; `workers` 0 means one per core; `unsafe`: run
        without the sandbox on a host that lacks it."""
        self._sandbox = sandbox
        self._unsafe = unsafe
        self._pass_environment = pass_environment
        self._functions = dict(functions)
        self._limits = limits
        self._slots = asyncio.Semaphore(workers or os.cpu_count() or 1)
        self._idle: list[_Worker] = []

    @property
    def domains(self) -> frozenset[str]:
        """The domains with a reward function."""
        return frozenset(self._functions)

    async def check(self) -> None:
        """Loads every function once. Raises `ConfigError` with the name of a failed one, or with
        the remedy if this host lacks the sandbox."""
        if self._functions and self._sandbox:
            self._sandbox = await self._sandbox.fitted()
        if self._functions and self._sandbox and (problem := await self._sandbox.problem()):
            text = f"no sandbox for reward functions: {problem}; {remedy()}"
            if not self._unsafe:
                raise ConfigError(text)
            log.warning("unsafe_sandbox", reason=text)
            self._sandbox = None
        for reference in dict.fromkeys(self._functions.values()):
            try:
                await self._ask(reference, {})
            except RewardError as error:
                raise ConfigError(f"reward_functions: {error}") from None

    async def score(self, transcript: Transcript, task: RewardTask) -> list[Reward]:
        """Returns the rewards of the task's domain. Raises `RewardError`, and `ResourceExhausted`
        when the host killed the process."""
        reference = self._functions[task.domain]
        arguments = {"trajectory": _plain(transcript), "task": _plain(task)}
        with _CALLS.time():
            return await self._ask(reference, arguments)

    async def close(self) -> None:
        """Ends all idle processes; a running call ends its process when it is cancelled."""
        idle, self._idle = self._idle, []
        for worker in idle:
            await worker.end()

    async def _ask(self, reference: str, arguments: Mapping[str, Any]) -> list[Reward]:
        async with self._slots:
            if self._idle:
                try:
                    return await self._attempt(self._idle.pop(), reference, arguments)
                except _Retryable:
                    log.info("reward_process_replaced", function=reference)
            worker = _Worker(self._limits, self._pass_environment, self._sandbox)
            return await self._attempt(worker, reference, arguments, fresh=True)

    async def _attempt(
        self,
        worker: _Worker,
        reference: str,
        arguments: Mapping[str, Any],
        *,
        fresh: bool = False,
    ) -> list[Reward]:
        """Raises the error of `_failed`, or `_Retryable` if a new worker may succeed."""
        try:
            answer = await self._answer(worker, reference, arguments)
        except _Died as death:
            answer = _CallResult(call=0, error=str(death), cause=death.cause)
        if not answer.error:
            return answer.rewards
        if not fresh and answer.cause in ("died", "killed", "memory"):
            raise _Retryable
        raise self._failed(reference, answer.cause, answer.error, worker)

    async def _answer(
        self, worker: _Worker, reference: str, arguments: Mapping[str, Any]
    ) -> _CallResult:
        """Returns the worker's answer; then the worker is idle or ended. Raises `_Died`."""
        keep = False
        try:
            answer = await self._load(worker, reference)
            if arguments and not answer.error:
                answer = await self._call(worker, reference, arguments)
            keep = answer.cause != "memory"
            return answer
        finally:
            if keep:
                self._idle.append(worker)
            else:
                await worker.end()

    async def _load(self, worker: _Worker, reference: str) -> _CallResult:
        if reference in worker.loaded:
            return _CallResult(call=0)
        try:
            answer = await within(LOAD_S, worker.ask({"function": reference}))
        except OutOfTime:
            raise _Timeout(f"was not loaded within {LOAD_S:g} s") from None
        if not answer.error:
            worker.loaded.add(reference)
        return answer

    async def _call(
        self, worker: _Worker, reference: str, arguments: Mapping[str, Any]
    ) -> _CallResult:
        try:
            return await within(
                self._limits.call_s, worker.ask({"function": reference, **arguments})
            )
        except OutOfTime:
            raise _Timeout(f"took over {self._limits.call_s:g} s") from None

    def _failed(self, reference: str, cause: str, text: str, worker: _Worker) -> ForgeError:
        _FAILURES.labels(cause).inc()
        log.warning(
            "reward_function_failed",
            function=reference,
            cause=cause,
            error=text,
            stderr=last_lines(worker.stderr, chars=LOGGED_CHARS),
        )
        # The message of a wrong setting has the function's name.
        text = text if cause == "setting" else f"reward function {reference}: {text}"
        return ResourceExhausted(text) if cause == "killed" else RewardError(text)


class _Worker:
    """One worker process."""

    def __init__(
        self,
        limits: RewardLimits,
        pass_environment: Collection[str],
        sandbox: ProcessSandbox | None,
    ) -> None:
        self.loaded: set[str] = set()
        self._sandbox = sandbox
        self._pass_environment = pass_environment
        self._limits = limits
        self._calls = 0
        self._process: ChildProcess | None = None
        self._stderr = OutputTail(STDERR_BYTES)
        self._group = ControlGroup()
        self._held = ExitStack()
        self._reading: asyncio.Task[None] | None = None

    @property
    def stderr(self) -> str:
        """The last output of the process on standard error."""
        return self._stderr.text

    async def ask(self, request: Mapping[str, Any]) -> _CallResult:
        """Returns the answer to one request. Raises `_Died`; after any error, `end` must follow."""
        self._calls += 1
        try:
            body = json.dumps({"call": self._calls, **request}).encode()
        except (TypeError, ValueError) as error:
            text = f"the trajectory is not plain data: {error}"
            return _CallResult(call=0, error=text, cause="value")
        process = self._process or await self._start()
        self._stderr.clear()
        try:
            answer = await _exchange(process, framed(body))
        # uvloop raises RuntimeError for a closed pipe.
        except (asyncio.IncompleteReadError, OSError, RuntimeError):
            raise await self._death(process) from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise _Died(f"its process sent an invalid answer: {error}") from None
        if answer.call != self._calls:
            raise _Died(f"its process answered call {answer.call} instead of {self._calls}")
        return answer

    async def end(self) -> None:
        """Kills the process and its children, and waits for their end."""
        if self._process is None:
            return
        await end_group(self._process)
        assert self._reading
        await asyncio.wait([self._reading], timeout=LAST_LINES_S)
        self._reading.cancel()
        self._held.close()

    async def _start(self) -> ChildProcess:
        box, passed = self._sandbox, self._pass_environment
        # The first process of the sandbox is bubblewrap's.
        parent, user = (1, UNPRIVILEGED_ID) if box else (os.getpid(), 0)
        numbers = (self._limits.memory_bytes, self._limits.processes, parent, user)
        words = (sys.executable, "-m", "forge.agents.scoring.reward_worker", *map(str, numbers))
        memory_bytes, tmp = self._limits.memory_bytes, box.tmp_bytes if box else 0
        self._group = group = self._held.enter_context(
            CONTROL_GROUPS.group(
                memory_bytes=memory_bytes and memory_bytes + tmp, processes=self._limits.processes
            )
        )
        starting = box.command(*words) if box else nullcontext((words, ()))
        async with starting as (command, descriptors):
            self._process = await child_start.start(
                *group.words,
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=box.environment(passed) if box else clean_environment(passed),
                start_new_session=True,
                pass_fds=descriptors,
            )
        assert self._process.stderr
        self._reading = asyncio.create_task(self._stderr.read(self._process.stderr))
        return self._process

    async def _death(self, process: ChildProcess) -> _Died:
        """Ends the process; returns the error, with the last line of its output."""
        # Before the kill: the message needs the exit code of the process itself.
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), LAST_LINES_S)
        code = process.returncode
        if self._sandbox and code is not None and code > SIGNALLED:
            code = SIGNALLED - code
        over_limit = self._group.over_limit()
        how = "closed the pipe of its answers" if code is None else how_it_ended(code)
        how += ", over its limit on memory" if over_limit else ""
        await self.end()
        lines = last_lines(self.stderr, chars=200)
        output = f"; it printed: {lines[-1]}" if lines else ""
        killed = killed_from_outside(code) and not over_limit
        return (_Killed if killed else _Died)(f"its process {how}{output}")


async def _exchange(process: ChildProcess, frame: bytes) -> _CallResult:
    assert process.stdin and process.stdout
    process.stdin.write(frame)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    if length > ANSWER_BYTES:
        raise ValueError(f"{length} bytes, at most {ANSWER_BYTES} are allowed")
    return msgspec.json.decode(await process.stdout.readexactly(length), type=_CallResult)


def _plain(value: Transcript | RewardTask) -> dict[str, Any]:
    # Not asdict(): it copies every message of a long history.
    return {field.name: getattr(value, field.name) for field in fields(value)}
