"""Threads that read from the store beside the writer.

Owns the bound on running and waiting reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from forge.core.errors import ResourceExhausted

T = TypeVar("T")

MAX_PENDING_READS = 1024


class ReaderRef(Protocol):
    """The reader threads, or a gate before them."""

    async def run(self, read: Callable[[], T]) -> T:
        """Returns the result of `read`."""


class ReaderThreads:
    """A bounded pool of reader threads."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="pool-reader")
        self._pending = 0

    async def run(self, read: Callable[[], T]) -> T:
        """Runs `read` on a reader thread. Raises `ResourceExhausted` if too many reads wait."""
        if self._pending >= MAX_PENDING_READS:
            raise ResourceExhausted(f"{self._pending} reads are waiting", retry_after_s=0.1)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, read)
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Drops waiting reads and waits for the running ones."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
