"""A queue bounded by bytes: backpressure in streams whose items differ in size."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteQueue(Generic[T]):
    """Items in order. Beyond `max_bytes` senders wait in `until_room`; one item may exceed it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._filled = asyncio.Event()
        self._ended = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, size_bytes: int) -> None:
        """Add an item, also to a full queue."""
        self._items.append((item, size_bytes))
        self._add_bytes(size_bytes)

    def end(self) -> None:
        """Nothing more will come: `until_filled` returns from now on."""
        self._ended = True
        self._filled.set()

    async def until_room(self) -> None:
        """Wait until the queue is not full."""
        await self._room.wait()

    async def until_filled(self) -> None:
        """Wait for an item, or for the end."""
        await self._filled.wait()

    def take(self, *, max_items: int | None = None, max_bytes: int | None = None) -> list[T]:
        """Remove and return the first items within both bounds, at least one if there is any."""
        taken: list[T] = []
        taken_bytes = 0
        while self._items and len(taken) != max_items:
            item, size_bytes = self._items[0]
            if taken and max_bytes is not None and taken_bytes + size_bytes > max_bytes:
                break
            self._items.popleft()
            taken.append(item)
            taken_bytes += size_bytes
        self._add_bytes(-taken_bytes)
        return taken

    def _add_bytes(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        for event, holds in (
            (self._room, self._bytes < self._max_bytes),
            (self._filled, bool(self._items) or self._ended),
        ):
            event.set() if holds else event.clear()
