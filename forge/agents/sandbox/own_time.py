"""Own time: the elapsed time that a program is responsible for, on a busy host and cluster.

Owns the measure and its limit. If more threads are runnable than the host has cores, time counts
in proportion less. Time spent waiting for the cluster does not count. Neither does time in which
this process could not run: its host stopped it, or other work blocked its event loop. So one limit
suits quiet and busy hosts, and every limited program ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from forge.runtime.concurrency.tasks import cancel_and_wait

Result = TypeVar("Result")

LOOK_S = 5.0
"""Interval between two measurements of the host's load."""
SHORTEST_LOOK_S = 0.01
LATE_S = 1.0
"""Delay of a measurement beyond which the time does not count: this process could not run."""
CLEAN_UP_S = 30.0
"""Time that cancelled work has to free its resources, for example to remove a container."""
_LOADAVG = Path("/proc/loadavg")


class OutOfTime(Exception):
    """The limit is reached."""


def crowding() -> float:
    """Returns the runnable threads per core of this host; at least 1."""
    try:
        to_run = most_to_run(_LOADAVG.read_text())
    except OSError:
        return 1.0
    return max(1.0, to_run / len(os.sched_getaffinity(0)))


def most_to_run(loadavg: str) -> float:
    """Returns the larger of the average load of the last minute and the present load, from a line
    of /proc/loadavg. The average follows a change only after a minute, too late for short limits.
    """
    average, _, _, entities, _ = loadavg.split()
    # This process is one of the running ones.
    return max(float(average), float(entities.partition("/")[0]) - 1)


async def nothing() -> float:
    """`waited_s` of a program that never waits for the cluster."""
    return 0.0


async def within(
    limit_s: float,
    work: Awaitable[Result],
    *,
    waited_s: Callable[[], Awaitable[float]] = nothing,
    crowding: Callable[[], float] = crowding,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Returns the result of `work`; cancels it after `limit_s` of own time.

    `waited_s` returns the seconds it has waited for the cluster; it is called only when the limit
    would be reached. Raises `OutOfTime`.
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
        await cancel_and_wait(task, repeat_s=CLEAN_UP_S)
