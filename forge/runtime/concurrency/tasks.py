"""Waits for the first of several tasks; ends tasks.

A stream of `grpc.aio` that is cancelled in the moment it fails may raise its own error instead of
`CancelledError`. So a task that repeats failed calls could survive its cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

_REPEAT_S = 1.0
"""Time until a task that has not ended is cancelled again, if its end waits for nothing."""


async def first_done(*awaitables: Awaitable[Any]) -> set[asyncio.Future[Any]]:
    """Wait until one ends, cancel the others, and return those that have ended.

    A coroutine becomes a task; a task or future stays itself. When cancelled, cancels all of them.
    """
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]
    finally:
        for task in tasks:
            task.cancel()


async def cancel_and_wait(
    *tasks: asyncio.Future[Any] | None, repeat_s: float | None = None
) -> None:
    """Cancel the tasks and return once all have ended; their results and errors stay in them.

    A task that has not ended after `repeat_s` is cancelled again, also in the middle of its
    clean-up; None: after a second.
    """
    running = {task for task in tasks if task is not None}
    pause_s = _REPEAT_S if repeat_s is None else repeat_s
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=pause_s)


def raise_if_cancelled() -> None:
    """Raise the `CancelledError` of the current task that a gRPC stream has lost, if it has."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
