"""The changes of a prefix cache, from the engine's thread to any number of readers.

Keeps the present blocks and the last changes. A reader that falls behind those begins again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile

from services.inference.engines.base import CacheChange

INTERVAL_S = 0.02
"""Shortest time between two changes that a reader gets: changes in between are joined."""
_KEPT = 65_536
"""Most kept changes."""


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    chain: bytes
    stored: bool


class CacheLog:
    """A listener of a `PrefixCache`. The engine's thread calls the listener's methods, the event
    loop `changes`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: dict[bytes, None] = {}
        self._entries: deque[_Entry] = deque(maxlen=_KEPT)
        self._number = 0
        self._cleared_at = 0
        """Number of the last clearance."""
        self._wakers: list[Callable[[], object]] = []
        """Callbacks that wake readers waiting for the next change; called from any thread."""

    def stored(self, chains: list[bytes]) -> None:
        """Note new blocks."""
        with self._lock:
            for chain in chains:
                self._present[chain] = None
                self._add(chain, stored=True)
            self._wake()

    def removed(self, chain: bytes) -> None:
        """Note an evicted block."""
        with self._lock:
            self._present.pop(chain, None)
            self._add(chain, stored=False)
            self._wake()

    def cleared(self) -> None:
        """Note that all blocks are gone."""
        with self._lock:
            self._present.clear()
            self._entries.clear()
            self._number += 1
            self._cleared_at = self._number
            self._wake()

    def present(self, chains: Iterable[bytes]) -> int:
        """Return how many of these blocks, from the first on, are cached."""
        with self._lock:
            return sum(1 for _ in takewhile(self._present.__contains__, chains))

    async def changes(self) -> AsyncGenerator[CacheChange, None]:
        """See `CacheReports`."""
        at, change = self._since(-1)
        yield change
        while True:
            await self._changed(at)
            await asyncio.sleep(INTERVAL_S)
            at, change = self._since(at)
            if change.anew or change.stored or change.removed:
                yield change

    async def _changed(self, at: int) -> None:
        """Wait for a change after the number `at`: a reader of an idle cache costs nothing."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        with self._lock:
            if self._number != at:
                return
            self._wakers.append(wake)
        try:
            await woken.wait()
        finally:
            with self._lock:
                if wake in self._wakers:
                    self._wakers.remove(wake)

    def _since(self, at: int) -> tuple[int, CacheChange]:
        """Return the number of the last change, and all after the number `at`."""
        with self._lock:
            number = self._number
            first = number - len(self._entries)
            if at < first or at < self._cleared_at:
                return number, CacheChange(stored=tuple(self._present), anew=True)
            # From the newest on: most of the kept entries are old.
            touched = [*islice(reversed(self._entries), number - at)][::-1]
        # The last word on each block: a removal and a later storage are a storage.
        last = {entry.chain: entry.stored for entry in touched}
        return number, CacheChange(
            removed=tuple(chain for chain, stored in last.items() if not stored),
            stored=tuple(chain for chain, stored in last.items() if stored),
        )

    def _wake(self) -> None:
        for wake in self._wakers:
            with suppress(RuntimeError):  # the reader's loop is closed
                wake()
        self._wakers.clear()

    def _add(self, chain: bytes, *, stored: bool) -> None:
        self._number += 1
        self._entries.append(_Entry(self._number, chain, stored))
