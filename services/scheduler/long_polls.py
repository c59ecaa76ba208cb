"""Long polls: calls that wait until an answer exists.

Owns the waiting calls and their order, and the wait itself. A caller that leaves cancels its future
and is skipped; an answer that was made for it meanwhile is given back.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from forge.core.errors import ResourceExhausted
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.futures import settle

Request = TypeVar("Request")
Answer = TypeVar("Answer")

MAX_WAITING = 16_384


class LongPolls(Generic[Request, Answer]):
    """First come, first served."""

    def __init__(
        self,
        serve: Callable[[Request], Answer | None],
        *,
        kind: Callable[[Request], Hashable],
    ) -> None:
        """`serve` returns None if there is no answer yet; then no request of the same `kind` has
        one either, so a change costs one try for each kind. A request keeps its first kind."""
        self._serve = serve
        self._kind = kind
        self._kinds: Counter[Hashable] = Counter()
        """Numbers of waiting calls."""
        self._waiting: deque[tuple[Request, Hashable, asyncio.Future[Answer]]] = deque()

    def enter(self, request: Request, future: asyncio.Future[Answer]) -> asyncio.Future[Answer]:
        """Let `future` wait for the answer, and return it. Raises ResourceExhausted."""
        if len(self._waiting) >= MAX_WAITING:
            self._forget_the_gone()
        if len(self._waiting) >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} calls are waiting already", retry_after_s=1.0)
        kind = self._kind(request)
        self._waiting.append((request, kind, future))
        self._kinds[kind] += 1
        return future

    def serve(self) -> None:
        """After a change: answer the calls that have an answer now."""
        unserved: deque[tuple[Request, Hashable, asyncio.Future[Answer]]] = deque()
        failed: set[Hashable] = set()
        while self._waiting and len(failed) < len(self._kinds):
            request, kind, future = self._waiting.popleft()
            if not future.done() and kind not in failed:
                answer = self._serve(request)
                if answer is None:
                    failed.add(kind)
                else:
                    future.set_result(answer)
            if future.done():
                self._left(kind)
            else:
                unserved.append((request, kind, future))
        self._waiting.extendleft(reversed(unserved))

    def dismiss(self, selected: Callable[[Request], bool], *, answer: Answer) -> None:
        """Answer the selected calls with `answer`."""
        for request, _, future in self._waiting:
            if selected(request):
                settle(future, answer)

    def close(self, error: Exception) -> None:
        """Answer every call with `error`."""
        while self._waiting:
            settle(self._waiting.popleft()[2], error)

    def _left(self, kind: Hashable) -> None:
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]

    def _forget_the_gone(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if not entry[2].done())
        self._kinds = Counter(kind for _, kind, _ in self._waiting)


def new_answer() -> asyncio.Future[Any]:
    """Return the future of one long poll's answer, a field of its message: the caller owns it, so
    that a caller that leaves gets no answer, wherever its message is."""
    return asyncio.get_running_loop().create_future()


async def poll(
    queue: ActorRef,
    request: Any,
    *,
    ask_s: float,
    wait_s: float,
    give_back: Callable[[Any], None] = lambda _: None,
) -> Any:
    """Return the answer to `request` within `wait_s`, else None. `ask_s` is for the actor's queue
    alone. `give_back` takes an answer that was made as the caller left."""
    future: asyncio.Future[Any] = request.answer
    try:
        await queue.ask(request, timeout_s=ask_s)
        await asyncio.wait({future}, timeout=wait_s)
        return future.result() if future.done() else None
    except BaseException:
        # Cancelled in the same turn of the loop as the answer was made.
        if future.done() and not future.cancelled() and future.exception() is None:
            give_back(future.result())
        raise
    finally:
        future.cancel()
