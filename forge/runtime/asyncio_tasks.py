"""Waits for the first of several tasks; ends tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


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


async def cancel_and_wait(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel the tasks and return once all have ended; their results and errors stay in them."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
