"""Detects a hang of vLLM: requests run, but no token and no answer of its scheduler comes in time.

Owns the rule; `process_watch` owns the consequence. Counts parts of the limit and reads no clock: a
suspension of the worker's own host counts as one part at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from forge.runtime.concurrency.tasks import cancel_and_wait

_PARTS = 10
"""The limit in parts; a hang is found at most two parts later."""


class Progress:
    """Signs of life of an engine that computes elsewhere."""

    def __init__(self) -> None:
        self._requests = 0
        self._pauses = 0
        self._signs = 0

    @property
    def signs(self) -> int:
        """Signs of life so far."""
        return self._signs

    @property
    def expected(self) -> bool:
        """True if requests run, and no work with a limit of its own stops them."""
        return self._requests > 0 and not self._pauses

    def note(self) -> None:
        """A request has tokens, or the engine has answered."""
        self._signs += 1

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around a request of the engine."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work with a limit of its own, in which no request samples."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self.note()


async def hung(
    progress: Progress,
    ask: Callable[[], Awaitable[object]],
    *,
    limit_s: float,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Return when signs of life were expected for `limit_s` and none came.

    `ask` returns as soon as the engine is between two steps; this is a sign, an error is none. It
    is called only during silence. A step longer than the limit is a hang.
    """
    silent, asked = 0, None
    try:
        # A request may have begun within the first part.
        while silent <= _PARTS:
            signs = progress.signs
            await sleep(limit_s / _PARTS)
            if not progress.expected or progress.signs != signs:
                silent = 0
                continue
            silent += 1
            if asked is None or asked.done():
                asked = asyncio.ensure_future(_asked(progress, ask))
    finally:
        if asked is not None:
            await cancel_and_wait(asked)


async def _asked(progress: Progress, ask: Callable[[], Awaitable[object]]) -> None:
    try:
        await ask()
    except Exception:  # Any error of the engine.
        return
    progress.note()
