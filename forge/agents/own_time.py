"""A limit on what somebody does by themselves, on a host and a cluster that may be overloaded.

Owns the measure: time counts as much less as the host has more to run than cores, and time spent
waiting for the cluster does not count. So a limit that is fair on a quiet host is fair on a busy
one, and what is limited still ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

LOOK_S = 5.0
"""Between two looks at the load of the host."""
SHORTEST_LOOK_S = 0.01


class OutOfTime(Exception):
    """The limit is reached."""


def crowding() -> float:
    """How many times more there is to run on this host than it has cores; at least 1."""
    try:
        return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
    except OSError:
        return 1.0


async def nothing() -> float:
    """`waited_s` of what waits for nobody."""
    return 0.0


async def within(
    limit_s: float,
    work: Awaitable[Result],
    *,
    waited_s: Callable[[], Awaitable[float]] = nothing,
    crowding: Callable[[], float] = crowding,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """The result of `work`, which is cancelled after `limit_s` seconds of its own.

    `waited_s` tells for how many seconds it has waited for the cluster so far; asked only where the
    limit seems to be reached. Raises `OutOfTime`.
    """
    task = asyncio.ensure_future(work)
    began_s = looked_s = clock()
    own_s = excused_s = 0.0
    try:
        while True:
            left_s = limit_s + excused_s - own_s
            if left_s <= 0:
                excused_s = await waited_s() * own_s / (looked_s - began_s)
                left_s = limit_s + excused_s - own_s
                if left_s <= 0:
                    raise OutOfTime
            pace = 1.0 / crowding()
            wait_s = min(max(left_s / pace, SHORTEST_LOOK_S), LOOK_S)
            await asyncio.wait({task}, timeout=wait_s)
            if task.done():
                return task.result()
            now_s = clock()
            own_s += (now_s - looked_s) * pace
            looked_s = now_s
    finally:
        task.cancel()
        await asyncio.wait({task})
