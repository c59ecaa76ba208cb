"""Work on memory that two processes share, on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_to_end(function: Callable[[], Result]) -> Result:
    """Run a function on a thread. A caller that is cancelled waits for its end: it would otherwise
    free memory that the thread fills."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait({running})
