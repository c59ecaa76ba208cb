"""Threads that read from the store, beside the writer and without waiting for it.

Owns how many reads may run and wait; what is read is the caller's business.
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
    """The readers, or what stands before them."""

    async def run(self, read: Callable[[], T]) -> T: ...


class Readers:
    """A bounded pool of reader threads."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="pool-reader")
        self._pending = 0

    async def run(self, read: Callable[[], T]) -> T:
        """What `read` returns, from one of the threads. Raises `ResourceExhausted` when too many
        reads wait already."""
        if self._pending >= MAX_PENDING_READS:
            raise ResourceExhausted(f"{self._pending} reads are waiting", retry_after_s=0.1)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, read)
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Drops the reads that have not begun and waits for the others."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
