"""Detects a hang of vLLM: work runs, but no token, no answer of its scheduler and no CPU time.

Owns the rule; `process_watch` owns the consequence. Counts parts of the limits and reads no clock:
a suspension of the worker's own host counts as one part at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forge.runtime.concurrency.tasks import cancel_and_wait

_PARTS = 10
"""The limit in parts; a hang is found at most two parts later."""
_WORKING_SHARE = 0.02
"""Share of one core that working processes use at least; waiting ones use less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Longest times without a sign of life while work is expected."""

    silence_s: float
    """Without a token, an answer and CPU time that counts."""
    working_s: float
    """Without a token and an answer, whatever CPU time is used."""
    cpu_counts: bool
    """Whether CPU time is a sign during requests: on a CPU. A thread that waits for a GPU may use a
    whole core. During an update it always counts."""


class Progress:
    """Signs of life of an engine that computes elsewhere."""

    def __init__(self) -> None:
        self._requests = 0
        self._updates = 0
        self.signs = 0
        """Signs of life so far."""

    @property
    def expected(self) -> bool:
        """True if requests or an update run."""
        return self._requests > 0 or self.updates

    @property
    def updates(self) -> bool:
        """True if an update of the weights runs; no request samples meanwhile."""
        return self._updates > 0

    def note(self) -> None:
        """A request has tokens, or the engine has answered."""
        self.signs += 1

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around a request of the engine."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around an update of the weights."""
        self._updates += 1
        try:
            yield
        finally:
            self._updates -= 1
            self.note()


async def hung(
    progress: Progress,
    ask: Callable[[], Awaitable[object]],
    used_s: Callable[[], float],
    limits: Limits,
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> str:
    """Return when signs of life were expected and none came for a limit; the limit's name.

    `ask` returns as soon as the engine is between two steps; this is a sign, an error is none. It
    is called only during silence. `used_s` returns the CPU seconds of the engine's processes so
    far.
    """
    part_s = limits.silence_s / _PARTS
    quiet, idle, asked = 0, 0, None
    try:
        # A request may have begun within the first part.
        while idle <= _PARTS and (quiet - 1) * part_s < limits.working_s:
            signs, used = progress.signs, used_s()
            await sleep(part_s)
            if not progress.expected or progress.signs != signs:
                quiet = idle = 0
                continue
            counts = limits.cpu_counts or progress.updates
            works = counts and used_s() - used >= _WORKING_SHARE * part_s
            quiet, idle = quiet + 1, 0 if works else idle + 1
            if asked is None or asked.done():
                asked = asyncio.ensure_future(_asked(progress, ask))
    finally:
        if asked is not None:
            await cancel_and_wait(asked)
    return "vllm.silence_s" if idle > _PARTS else "request_timeout_s"


async def _asked(progress: Progress, ask: Callable[[], Awaitable[object]]) -> None:
    try:
        await ask()
    except Exception:  # Any error of the engine.
        return
    progress.note()
