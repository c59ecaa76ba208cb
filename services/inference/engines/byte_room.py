"""A bound on the bytes of hand-offs in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class ByteRoom:
    """At most `capacity_bytes`, or one hand-off; granted in order."""

    def __init__(
        self, capacity_bytes: int, *, on_change: Callable[[int], object] = lambda change: None
    ) -> None:
        """`on_change`: observes the bytes that are taken, and those that are given back (below
        0)."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._on_change = on_change
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, needed_bytes: int) -> None:
        """Wait for room."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((needed_bytes, granted))
        self._advance()
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.give(needed_bytes)
            self._advance()
            raise

    @asynccontextmanager
    async def taken(self, needed_bytes: int) -> AsyncIterator[None]:
        """Around the use of room, once there is some."""
        await self.take(needed_bytes)
        try:
            yield
        finally:
            self.give(needed_bytes)

    def give(self, freed_bytes: int) -> None:
        """Give room back."""
        self._use(-freed_bytes)
        self._advance()

    def _advance(self) -> None:
        while self._line:
            needed_bytes, granted = self._line[0]
            # Done: its caller has left.
            if not granted.done():
                if self.used_bytes and self.used_bytes + needed_bytes > self.capacity_bytes:
                    return
                self._use(needed_bytes)
                granted.set_result(None)
            self._line.popleft()

    def _use(self, change: int) -> None:
        self.used_bytes += change
        self._on_change(change)
