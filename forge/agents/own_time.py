"""A limit on what somebody does by themselves, on a host and a cluster that may be overloaded.

Owns the measure: time counts as much less as the host has more to run than cores. Time spent
waiting for the cluster does not count, nor does time in which this process could not run: its host
stopped it, or other work held its event loop. So a limit that is fair on a quiet host is fair on a
busy one, and what is limited still ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

LOOK_S = 5.0
"""Between two looks at the load of the host."""
SHORTEST_LOOK_S = 0.01
LATE_S = 1.0
"""A look that comes later than this was held up; what is beyond it does not count."""
_LOADAVG = Path("/proc/loadavg")


class OutOfTime(Exception):
    """The limit is reached."""


def crowding() -> float:
    """How many times more there is to run on this host than it has cores; at least 1."""
    try:
        to_run = most_to_run(_LOADAVG.read_text())
    except OSError:
        return 1.0
    return max(1.0, to_run / len(os.sched_getaffinity(0)))


def most_to_run(loadavg: str) -> float:
    """Of a line of /proc/loadavg: the average of the last minute, or what is there to run now.

    The average alone is a minute late, when a limit of seconds has long been judged.
    """
    average, _, _, entities, _ = loadavg.split()
    # This process is one of those that run now.
    return max(float(average), float(entities.partition("/")[0]) - 1)


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
            own_s += min(now_s - looked_s, wait_s + LATE_S) * pace
            looked_s = now_s
    finally:
        task.cancel()
        await asyncio.wait({task})
