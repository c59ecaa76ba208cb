"""Retries of a call.

Owns the pauses and the deadline. `ForgeError.retryable` decides which errors to retry; the caller
makes its call idempotent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from forge.core.errors import ForgeError
from forge.runtime.concurrency.backoff import Backoff

Result = TypeVar("Result")


class Patience:
    """Deadline and pauses of the retries of one call."""

    def __init__(self, retry_for_s: float, *, clock: Callable[[], float], rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._deadline_s = clock() + retry_for_s
        self._backoff = Backoff(0.05, 2.0)

    def pause_s(self, error: ForgeError) -> float:
        """Return the pause before the next attempt. Raises `error` if it is not to be retried."""
        # The server's hint overrides the backoff.
        delay_s = self._backoff.next_s()
        pause_s = error.retry_after_s or delay_s * self._rng.uniform(0.5, 1.5)
        if not error.retryable or self._clock() + pause_s > self._deadline_s:
            raise error
        return pause_s


async def retried(
    attempt: Callable[[], Awaitable[Result]],
    *,
    retry_for_s: float,
    retry_on: tuple[type[ForgeError], ...] = (ForgeError,),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    rng: Random | None = None,
) -> Result:
    """Repeat `attempt` with growing, jittered pauses until it succeeds, and return its result.

    Raises errors that are not retryable, or not in `retry_on`, at once, and the last error when the
    next attempt would begin later than `retry_for_s` from now.
    """
    patience = Patience(retry_for_s, clock=clock, rng=rng or Random())
    while True:
        try:
            return await attempt()
        except retry_on as error:
            pause_s = patience.pause_s(error)
        await sleep(pause_s)


def retried_sync(
    attempt: Callable[[], Result],
    *,
    retry_for_s: float,
    retry_on: tuple[type[ForgeError], ...] = (ForgeError,),
) -> Result:
    """`retried` for callers without an event loop; pauses block the calling thread."""
    patience = Patience(retry_for_s, clock=time.monotonic, rng=Random())
    while True:
        try:
            return attempt()
        except retry_on as error:
            pause_s = patience.pause_s(error)
        time.sleep(pause_s)
