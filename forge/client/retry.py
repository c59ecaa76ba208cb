"""Trying a call again while that can help.

Owns the decision when and how often; which errors are worth it is the error tree's
(`ForgeError.retryable`), and making a call safe to repeat is its author's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from forge.core.errors import ForgeError

Result = TypeVar("Result")

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0


async def retried(
    attempt: Callable[[], Awaitable[Result]],
    *,
    retry_for_s: float,
    retry_on: tuple[type[ForgeError], ...] = (ForgeError,),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    rng: Random | None = None,
) -> Result:
    """The first success of `attempt`, repeated with growing, jittered pauses.

    Errors that are not retryable, or not in `retry_on`, end it at once; so does the first error
    after which the next attempt would begin later than `retry_for_s` from now.
    """
    random = rng or Random()
    deadline = clock() + retry_for_s
    delay_s = FIRST_DELAY_S
    while True:
        try:
            return await attempt()
        except retry_on as error:
            # The server's own word on when to come back beats our guess.
            pause_s = error.retry_after_s or delay_s * random.uniform(0.5, 1.5)
            if not error.retryable or clock() + pause_s > deadline:
                raise
        await sleep(pause_s)
        delay_s = min(delay_s * 2, MAX_DELAY_S)
