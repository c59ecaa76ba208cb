"""Live updates: server-sent events of the topics that a page shows.

A page that does not read for `WRITE_S` is ended; its browser connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from aiohttp import web

from forge.core.errors import ForgeError, ResourceExhausted
from services.console.data.topics import START, Cursor, News, Topic
from services.console.metrics import DROPPED, VIEWERS

PING_S = 15.0
WRITE_S = 10.0
PAUSE_S = 0.2
"""Between two writes to one page: several changes are then one state."""


class Viewers:
    """The pages with live updates."""

    def __init__(self, topics: Mapping[str, Topic], news: News, *, most: int) -> None:
        self.topics = topics
        self._news = news
        self._most = most
        self._open = 0
        VIEWERS.set_function(lambda: self._open)

    async def stream(
        self, request: web.Request, names: Sequence[str], *, check: Callable[[], None]
    ) -> web.StreamResponse:
        """Sends the topics until the page leaves, or until `check` raises: the token has expired or
        was revoked. Raises `ResourceExhausted` above the limit."""
        if self._open >= self._most:
            raise ResourceExhausted(
                f"{self._most} pages have live updates (http.max_viewers)", retry_after_s=10.0
            )
        self._open += 1
        try:
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            with ExitStack() as watches:
                for name in names:
                    watches.enter_context(self.topics[name].watch())
                await self._send(response, names, check)
            return response
        finally:
            self._open -= 1

    async def _send(
        self, response: web.StreamResponse, names: Sequence[str], check: Callable[[], None]
    ) -> None:
        cursors: dict[str, Cursor] = dict.fromkeys(names, START)
        # At once: the page shows that it is connected.
        await response.write(b"retry: 2000\n\n")
        while True:
            change = self._news.next()
            try:
                check()
            except ForgeError:
                return
            events = []
            for name in names:
                payload, cursors[name] = self.topics[name].since(cursors[name])
                if payload is not None:
                    events.append(b"event: %s\ndata: %s\n\n" % (name.encode(), payload))
            if not events:
                try:
                    async with asyncio.timeout(PING_S):
                        await change.wait()
                    continue
                except TimeoutError:
                    events.append(b": ping\n\n")
            try:
                async with asyncio.timeout(WRITE_S):
                    await response.write(b"".join(events))
            except TimeoutError:
                DROPPED.inc()
                return
            await asyncio.sleep(PAUSE_S)
