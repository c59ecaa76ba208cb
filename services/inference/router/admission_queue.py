"""The requests that wait in a router, and those that it has admitted.

Owns their bound and their order, and how long one waits while no worker samples. Not here: the
placement of admitted requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from forge.core.errors import ResourceExhausted, Unavailable
from forge.runtime.concurrency.futures import settle
from services.inference.router.messages import QueuePlace
from services.inference.router.metrics import QUEUED_REQUESTS

OVERCOMMIT = 1.25
"""Requests admitted per decode slot, since some are in prefill or between workers."""
MIN_ADMITTED = 16
"""Admitted even without a decode worker: these requests report it to their callers."""
_RETRY_AFTER_S = 1.0


class AdmissionQueue:
    """On the event loop."""

    def __init__(self, *, limit: int, patience_s: float, clock: Callable[[], float]) -> None:
        """`patience_s`: longest wait while no worker samples."""
        self._limit = limit
        self._patience_s = patience_s
        self._clock = clock
        self._capacity = 0
        self._unserved_since_s = clock()
        self._waiting: deque[QueuePlace] = deque()
        self._admitted: set[QueuePlace] = set()
        self._expiry: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    def join(self, place: QueuePlace) -> None:
        """Queue a request. Raises ResourceExhausted when too many wait."""
        # Callers that gave up have left the queue.
        if len(self._waiting) >= self._limit:
            raise ResourceExhausted(
                f"{len(self._waiting)} requests are waiting, the maximum",
                retry_after_s=_RETRY_AFTER_S,
            )
        place.asked_s = self._clock()
        self._waiting.append(place)
        self._advance()

    def leave(self, place: QueuePlace) -> None:
        """Remove a request, waiting or admitted."""
        if place in self._admitted:
            self._admitted.remove(place)
        elif place in self._waiting:
            self._waiting.remove(place)
        self._advance()

    def resize(self, capacity: int) -> None:
        """Note how many requests all workers sample at the same time."""
        if self._capacity and not capacity:
            self._unserved_since_s = self._clock()
        self._capacity = capacity
        self._advance()

    def close(self) -> None:
        """Fail the waiting requests."""
        if self._expiry is not None:
            self._expiry.cancel()
        # An error: a cancellation would look like the caller's own.
        for place in self._waiting:
            settle(place.granted, Unavailable("the router stopped"))

    def _advance(self) -> None:
        most = max(MIN_ADMITTED, round(self._capacity * OVERCOMMIT))
        while self._waiting and len(self._admitted) < most:
            place = self._waiting.popleft()
            if not place.granted.done():
                self._admitted.add(place)
                place.granted.set_result(None)
        QUEUED_REQUESTS.set(len(self._waiting))
        if self._waiting and not self._capacity and self._expiry is None:
            left_s = self._left_s(self._waiting[0])
            self._expiry = asyncio.get_running_loop().call_later(max(0.0, left_s), self._expire)

    def _left_s(self, place: QueuePlace) -> float:
        """Time for which a request may still wait while no worker samples."""
        since_s = max(place.asked_s, self._unserved_since_s)
        return since_s + self._patience_s - self._clock()

    def _expire(self) -> None:
        self._expiry = None
        while self._waiting and not self._capacity and self._left_s(self._waiting[0]) <= 0:
            late = Unavailable(
                f"no decode instance within {self._patience_s:g} s", retry_after_s=_RETRY_AFTER_S
            )
            settle(self._waiting.popleft().granted, late)
        self._advance()
