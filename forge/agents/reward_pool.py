"""Runs reward functions in processes of their own, within limits.

Owns the worker processes: at most so many, started when first needed, used again for every
function, killed with all they started when one takes too long, dies or is no longer waited for.
Functions are strangers' code: whatever they do costs the rollout they score, never the runner.

A worker that served others before may die of what those left behind, such as memory. A call that
fails so is made once more, in a fresh process; everything else is final and raises `RewardError`.
The attempt has then failed, and is made again as often as the scheduler allows. A process that its
host kills, where memory runs out, raises `ResourceExhausted`: that counts against no task.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Final

import msgspec

from forge.agents.child import Tail, how_it_ended, kill_group, killed_from_outside, last_lines
from forge.agents.environments.base import Reward, Transcript
from forge.agents.own_time import OutOfTime, within
from forge.agents.reward_worker import LENGTH_BYTES, framed
from forge.agents.rewards import RewardTask
from forge.core.errors import ConfigError, ForgeError, ResourceExhausted
from forge.runtime.telemetry import counter, histogram, log

LOAD_S: Final = 120.0
"""Longest that starting a process and importing a function may take."""
ANSWER_BYTES: Final = 1 << 20
"""Of one call; more is taken for garbage."""
STDERR_BYTES: Final = 8 << 10
LAST_WORDS_S: Final = 1.0
"""How long the last words of a dead process are waited for: who escaped its group may hold it."""
LOGGED_CHARS: Final = 2000

_CALLS = histogram(
    "forge_runner_reward_seconds", "Time of one call of a reward function, waiting included."
)
_FAILURES = counter(
    "forge_runner_reward_failures_total", "Calls of reward functions that failed.", ["cause"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLimits:
    """What one call, and the process it runs in, may use; 0 sets no limit on memory, processes."""

    call_s: float
    memory_bytes: int
    """Private writable memory of each of its processes (RLIMIT_DATA)."""
    processes: int
    """Processes and threads of the runner's user, all together (RLIMIT_NPROC)."""


class RewardError(ForgeError):
    """A reward function gave no reward; says which function and why."""


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    call: int
    """Number of the call it answers: bytes that a function wrote there itself have none."""
    rewards: list[Reward] = []
    error: str = ""
    cause: str = ""


class _Died(Exception):
    """The process is gone or makes no sense any more; says how."""

    cause = "died"


class _Killed(_Died):
    """The host killed it."""

    cause = "killed"


class _Late(Exception):
    """Its time is up."""


class _Spoiled(Exception):
    """The call failed in a process that earlier calls may have spoiled."""


class RewardPool:
    """The reward functions of one runner, by domain."""

    def __init__(
        self, functions: Mapping[str, str], *, limits: RewardLimits, workers: int = 0
    ) -> None:
        """`functions` are "module:function" by domain; `workers` 0 means one per core."""
        self._functions = dict(functions)
        self._limits = limits
        self._slots = asyncio.Semaphore(workers or os.cpu_count() or 1)
        self._idle: list[_Worker] = []

    @property
    def domains(self) -> frozenset[str]:
        """Those that have a function."""
        return frozenset(self._functions)

    async def check(self) -> None:
        """Load every function once. Raises `ConfigError` naming one that cannot be."""
        for reference in dict.fromkeys(self._functions.values()):
            try:
                await self._ask(reference, {})
            except RewardError as error:
                raise ConfigError(f"reward_functions: {error}") from None

    async def score(self, transcript: Transcript, task: RewardTask) -> list[Reward]:
        """What the function of the task's domain returned. Raises `RewardError`, and
        `ResourceExhausted` where the host killed its process."""
        reference = self._functions[task.domain]
        arguments = {"trajectory": _plain(transcript), "task": _plain(task)}
        with _CALLS.time():
            return await self._ask(reference, arguments)

    async def close(self) -> None:
        """End every idle process; calls that still run end theirs when they are cancelled."""
        idle, self._idle = self._idle, []
        for worker in idle:
            await worker.end()

    async def _ask(self, reference: str, arguments: Mapping[str, Any]) -> list[Reward]:
        async with self._slots:
            if self._idle:
                try:
                    return await self._attempt(self._idle.pop(), reference, arguments)
                except _Spoiled:
                    log.info("reward_process_replaced", function=reference)
            return await self._attempt(_Worker(self._limits), reference, arguments, fresh=True)

    async def _attempt(
        self,
        worker: _Worker,
        reference: str,
        arguments: Mapping[str, Any],
        *,
        fresh: bool = False,
    ) -> list[Reward]:
        """Raises what `_failed` makes, or `_Spoiled` when a fresh worker may do better."""
        try:
            answer = await self._answer(worker, reference, arguments)
        except _Died as death:
            answer = _Answer(call=0, error=str(death), cause=death.cause)
        except _Late as lateness:
            answer = _Answer(call=0, error=str(lateness), cause="timeout")
        if not answer.error:
            return answer.rewards
        if not fresh and answer.cause in ("died", "killed", "memory"):
            raise _Spoiled
        raise self._failed(reference, answer.cause, answer.error, worker)

    async def _answer(
        self, worker: _Worker, reference: str, arguments: Mapping[str, Any]
    ) -> _Answer:
        """The worker's answer; it is idle again afterwards, or ended. Raises `_Died`, `_Late`."""
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

    async def _load(self, worker: _Worker, reference: str) -> _Answer:
        if reference in worker.loaded:
            return _Answer(call=0)
        try:
            answer = await within(LOAD_S, worker.ask({"function": reference}))
        except OutOfTime:
            raise _Late(f"was not loaded within {LOAD_S:g} s") from None
        if not answer.error:
            worker.loaded.add(reference)
        return answer

    async def _call(self, worker: _Worker, reference: str, arguments: Mapping[str, Any]) -> _Answer:
        try:
            return await within(
                self._limits.call_s, worker.ask({"function": reference, **arguments})
            )
        except OutOfTime:
            raise _Late(f"took over {self._limits.call_s:g} s") from None

    def _failed(self, reference: str, cause: str, text: str, worker: _Worker) -> ForgeError:
        _FAILURES.labels(cause).inc()
        log.warning(
            "reward_function_failed",
            function=reference,
            cause=cause,
            error=text,
            stderr=last_lines(worker.stderr, chars=LOGGED_CHARS),
        )
        # A setting's own message names the function already.
        text = text if cause == "setting" else f"reward function {reference}: {text}"
        return ResourceExhausted(text) if cause == "killed" else RewardError(text)


class _Worker:
    """One process."""

    def __init__(self, limits: RewardLimits) -> None:
        self.loaded: set[str] = set()
        self._limits = limits
        self._calls = 0
        self._process: Process | None = None
        self._stderr = Tail(STDERR_BYTES)
        self._reading: asyncio.Task[None] | None = None

    @property
    def stderr(self) -> str:
        return self._stderr.text

    async def ask(self, request: Mapping[str, Any]) -> _Answer:
        """Raises `_Died`. After any exception the process must be ended."""
        self._calls += 1
        try:
            body = json.dumps({"call": self._calls, **request}).encode()
        except (TypeError, ValueError) as error:
            text = f"the trajectory is not plain data: {error}"
            return _Answer(call=0, error=text, cause="value")
        process = self._process or await self._start()
        self._stderr.clear()
        try:
            answer = await _exchange(process, framed(body))
        # The last is how uvloop says that the pipe is closed.
        except (asyncio.IncompleteReadError, OSError, RuntimeError):
            raise await self._death(process) from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise _Died(f"its process answered with garbage: {error}") from None
        if answer.call != self._calls:
            raise _Died(f"its process answered call {answer.call}, asked was {self._calls}")
        return answer

    async def end(self) -> None:
        """Kill it and all it started; nothing is left when this returns."""
        if self._process is None:
            return
        kill_group(self._process)
        await self._process.wait()
        assert self._reading
        await asyncio.wait([self._reading], timeout=LAST_WORDS_S)
        self._reading.cancel()

    async def _start(self) -> Process:
        limits = (self._limits.memory_bytes, self._limits.processes, os.getpid())
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "forge.agents.reward_worker", *map(str, limits)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            # The runner's own settings name its keys: no business of a reward function.
            env={key: value for key, value in os.environ.items() if key[:6] != "FORGE_"},
            start_new_session=True,
        )
        assert self._process.stderr
        self._reading = asyncio.create_task(self._stderr.read(self._process.stderr))
        return self._process

    async def _death(self, process: Process) -> _Died:
        """How it ended, with its last words; nothing is left of it when this returns."""
        # Before it is killed for good: how it ended by itself is what matters.
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), LAST_WORDS_S)
        code = process.returncode
        how = "closed the pipe of its answers" if code is None else how_it_ended(code)
        await self.end()
        words = last_lines(self.stderr, chars=200)
        told = f"; it said: {words[-1]}" if words else ""
        return (_Killed if killed_from_outside(code) else _Died)(f"its process {how}{told}")


async def _exchange(process: Process, frame: bytes) -> _Answer:
    assert process.stdin and process.stdout
    process.stdin.write(frame)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    if length > ANSWER_BYTES:
        raise ValueError(f"{length} bytes, at most {ANSWER_BYTES} are allowed")
    return msgspec.json.decode(await process.stdout.readexactly(length), type=_Answer)


def _plain(value: Transcript | RewardTask) -> dict[str, Any]:
    # Not asdict(): it copies every message of a long history.
    return {field.name: getattr(value, field.name) for field in fields(value)}
