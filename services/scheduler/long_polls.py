"""Long polls: calls that wait until an answer exists.

Owns the waiting calls and their order. A caller that leaves cancels its future and is skipped.
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


class LongPolls(Generic[Request, Answer]):
    """First come, first served."""

    def __init__(self, serve: Callable[[Request], Answer | None], *, alike: bool) -> None:
        """`serve` returns None if there is no answer yet. `alike`: then no other request has one
        either, so a change costs one try."""
        self._serve = serve
        self._alike = alike
        self._waiting: deque[tuple[Request, asyncio.Future[Answer]]] = deque()

    def enter(self, request: Request) -> asyncio.Future[Answer]:
        """The answer, now or later. Raises ResourceExhausted."""
        if len(self._waiting) >= MAX_WAITING:
            self._forget_the_gone()
        if len(self._waiting) >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} calls are waiting already", retry_after_s=1.0)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        return future

    def serve(self) -> None:
        """After a change: answer the calls that have an answer now."""
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
        """Answer the selected calls with `answer`."""
        for request, future in self._waiting:
            if whom(request) and not future.done():
                future.set_result(answer)

    def close(self, error: Exception) -> None:
        """Answer every call with `error`."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def _forget_the_gone(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if not entry[1].done())
