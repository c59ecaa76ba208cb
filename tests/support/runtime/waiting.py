"""Waiting for what another task, thread or process does, where no event announces it.

Owns the one poll of all tests. It looks again at once some times, for what the event loop does by
itself, then ever more rarely, for processes. Nothing depends on how long it takes.
"""

from __future__ import annotations

import inspect
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar, overload

Result = TypeVar("Result")

LIMIT_S = 240.0
"""Less than a test may take: a test that waits in vain says for what."""
AT_ONCE = 10
LONGEST_PAUSE_S = 0.05


class StillNotSo(AssertionError):
    """The limit is reached; says what was waited for."""


@overload
async def until(
    condition: Callable[[], Awaitable[Result | None]], *, limit_s: float = LIMIT_S
) -> Result: ...
@overload
async def until(condition: Callable[[], Result | None], *, limit_s: float = LIMIT_S) -> Result: ...
async def until(
    condition: Callable[[], Result | Awaitable[Result | None] | None], *, limit_s: float = LIMIT_S
) -> Result:
    """The first true value of `condition`, a function or a coroutine function.

    Raises `StillNotSo`.
    """
    for pause_s in _pauses(condition, limit_s):
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await sleep(pause_s)
    raise AssertionError("the pauses never end")


async def settle(rounds: int = 100) -> None:
    """Lets everything on the event loop run that can: what is not done then waits for something."""
    for _ in range(rounds):
        await sleep(0)


def until_blocking(
    condition: Callable[[], Result], *, limit_s: float = LIMIT_S, least_pause_s: float = 0.0
) -> Result:
    """The same for a test without an event loop. `least_pause_s`: for a costly condition."""
    for pause_s in _pauses(condition, limit_s):
        if found := condition():
            return found
        time.sleep(max(pause_s, least_pause_s))
    raise AssertionError("the pauses never end")


def _pauses(condition: Callable[[], object], limit_s: float) -> Iterator[float]:
    """How long to wait before each look. Raises `StillNotSo` at the limit."""
    give_up_s = time.monotonic() + limit_s
    yield from [0.0] * AT_ONCE
    pause_s = 0.001
    while time.monotonic() < give_up_s:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    where = inspect.getsource(condition).strip()
    raise StillNotSo(f"still not so after {limit_s:g} s: {where}")
