"""Work on threads that an engine waits for, or that may hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from forge.runtime.concurrency.futures import settle

Result = TypeVar("Result")


async def run_to_end(
    function: Callable[[], Result], *, give_up: Callable[[], None] | None = None
) -> Result:
    """Run a function on a thread. A caller that is cancelled waits for its end: it would otherwise
    free memory that the thread fills. `give_up` then makes it end earlier."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    finally:
        if give_up is not None and not running.done():
            give_up()
        await asyncio.wait({running})


async def run_detached(function: Callable[[], Result], *, name: str) -> Result:
    """Run a function that may hang, on a thread that does not delay the end of the process. A
    caller that is cancelled leaves it alone."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Result] = loop.create_future()

    def run() -> None:
        outcome: Result | Exception
        try:
            outcome = function()
        except Exception as error:
            outcome = error
        # The event loop may have ended before.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, ended, outcome)

    Thread(target=run, name=name, daemon=True).start()
    return await ended
