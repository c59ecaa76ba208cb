"""Calls that wait until there is something for them: long polls, without polling.

Owns who waits and in which order. A caller that leaves cancels its future and is passed over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from forge.core.errors import ResourceExhausted

Request = TypeVar("Request")
Answer = TypeVar("Answer")

MAX_WAITING = 16_384


class WaitingRoom(Generic[Request, Answer]):
    """First come, first served."""

    def __init__(self, serve: Callable[[Request], Answer | None], *, alike: bool) -> None:
        """`serve` gives None when there is nothing for a request. `alike`: then there is nothing
        for any other either, so that a change does not cost a try for everybody."""
        self._serve = serve
        self._alike = alike
        self._waiting: deque[tuple[Request, asyncio.Future[Answer]]] = deque()

    def enter(self, request: Request) -> asyncio.Future[Answer]:
        """The answer, now or when there is one. Raises ResourceExhausted."""
        if len(self._waiting) >= MAX_WAITING:
            self._forget_the_gone()
        if len(self._waiting) >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} calls are waiting already", retry_after_s=1.0)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        return future

    def serve(self) -> None:
        """Something changed: answer those for whom there is something now."""
        unserved: deque[tuple[Request, asyncio.Future[Answer]]] = deque()
        while self._waiting:
            request, future = self._waiting.popleft()
            if future.done():
                continue
            answer = self._serve(request)
            if answer is not None:
                future.set_result(answer)
                continue
            unserved.append((request, future))
            if self._alike:
                break
        self._waiting.extendleft(reversed(unserved))

    def dismiss(self, whom: Callable[[Request], bool], *, answer: Answer) -> None:
        """Those get `answer`, and wait no longer."""
        for request, future in self._waiting:
            if whom(request) and not future.done():
                future.set_result(answer)

    def close(self, error: Exception) -> None:
        """Nobody will be served any more."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def _forget_the_gone(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if not entry[1].done())
