"""Topics of live pages: the latest state of one subject, read only while a page watches it.

A topic holds one state and no queue, so a page that reads slowly gets fewer, newer states, and
memory does not grow with the pages. All pages share one read.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec

from forge.core.errors import ForgeError
from services.console.metrics import READS

Cursor = tuple[int, int]
START: Cursor = (0, 0)
"""Cursor of a page that has nothing."""
encode = msgspec.json.encode


def pause_s(period_s: float, took_s: float) -> float:
    """Pause after a read: reads of a slow service take a tenth of the time at most."""
    return max(period_s, 9 * took_s)


class News:
    """Wakes every live page after a change of any topic."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Note that a topic has changed."""
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set at the next change after this call."""
        return self._event


class Topic(ABC):
    """The base of all topics."""

    name: ClassVar[str]

    def __init__(self, news: News) -> None:
        self._news = news
        self._watchers = 0
        self._watched = asyncio.Event()
        self._unwatched = asyncio.Event()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keep the topic up to date in this block."""
        self._watchers += 1
        self._watched.set()
        self._unwatched.clear()
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._watched.clear()
                self._unwatched.set()

    async def unwatched(self) -> None:
        """Wait until no page watches."""
        await self._unwatched.wait()

    @property
    def watched(self) -> asyncio.Event:
        """Set while a page watches."""
        return self._watched

    @abstractmethod
    def since(self, cursor: Cursor) -> tuple[bytes | None, Cursor]:
        """JSON of the changes after a cursor, None without any; and the cursor after it."""

    @abstractmethod
    async def run(self) -> None:
        """Keeps the topic up to date while it is watched; endless."""


class Poll(Topic):
    """A topic that is read again and again."""

    def __init__(
        self,
        name: str,
        news: News,
        read: Callable[[], Awaitable[Any]],
        *,
        period_s: float,
        timeout_s: float,
    ) -> None:
        """`read` returns the state as plain data; after a ForgeError the last state stays, with the
        error beside it."""
        super().__init__(news)
        self.name = name  # type: ignore[misc]
        self._read = read
        self._period_s, self._timeout_s = period_s, timeout_s
        self._version = 0
        self._state: Any = None
        self._payload = b""

    def since(self, cursor: Cursor) -> tuple[bytes | None, Cursor]:
        """The whole state, if it is newer."""
        if cursor[0] == self._version:
            return None, cursor
        return self._payload, (self._version, 0)

    async def run(self) -> None:
        """Reads while watched."""
        while True:
            await self._watched.wait()
            began_s = time.monotonic()
            await self.refresh()
            await asyncio.sleep(pause_s(self._period_s, time.monotonic() - began_s))

    async def refresh(self) -> None:
        """Reads once; an equal state is no change."""
        error = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                self._state = await self._read()
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except ForgeError as failed:
            error = str(failed)
        READS.labels(self.name, "failed" if error else "ok").inc()
        payload = encode({"state": self._state, "error": error})
        if payload != self._payload:
            self._payload, self._version = payload, self._version + 1
            self._news.tell()
