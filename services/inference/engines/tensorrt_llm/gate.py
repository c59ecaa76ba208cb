"""Lets requests into the engine, and an update be alone with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Gate:
    """Open but during an update; one update at a time."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._updates = asyncio.Lock()

    async def passed(self) -> None:
        """Wait until it is open; it stays so until the next await of the caller."""
        while not self._open.is_set():
            await self._open.wait()

    @asynccontextmanager
    async def closed(self) -> AsyncGenerator[None, None]:
        """Keep it closed within."""
        async with self._updates:
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()
