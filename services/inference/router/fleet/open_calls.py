"""Calls in flight on a worker, and their end when the worker is lost.

A drained worker leaves discovery and finishes its calls. A frozen one, or one behind a broken
network, leaves when its lease ends, and its calls would wait for gRPC's keepalive, or forever. So
the router asks a worker that left with calls in flight for an answer, and cancels them without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from forge.core.errors import DeadlineExceeded, ForgeError, Unavailable

PING_S = 3.0
"""Longest wait for the answer of a worker that left discovery."""
_PERIOD_S = 2.0

Ping = Callable[[str], Awaitable[object]]
"""Returns when the process at an address answers. Raises Unavailable or DeadlineExceeded."""


class WorkerLost(Unavailable):
    """The worker left discovery and does not answer."""


class Call(Protocol):
    """A call of gRPC."""

    def cancel(self) -> bool:
        """End the call; its caller gets CancelledError."""


class OpenCalls:
    """The calls in flight on one worker."""

    def __init__(self) -> None:
        self.lost = False
        """Whether the worker is lost; later calls end at once."""
        self._calls: set[Call] = set()

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """Context manager of a pending call. Raises WorkerLost if the worker is lost meanwhile."""
        self._calls.add(call)
        if self.lost:
            call.cancel()
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.lost and not (task is not None and task.cancelling()):
                raise WorkerLost("the worker left discovery and does not answer") from None
            raise
        finally:
            self._calls.discard(call)

    def lose(self) -> None:
        """Cancel all calls."""
        self.lost = True
        for call in tuple(self._calls):
            call.cancel()


async def is_silent(ping: Ping, address: str) -> bool:
    """Whether the process at `address` gives no answer at all.

    A refusal is none of silence: a worker at the end of its drain takes no new call while the last
    pieces of its answers travel, and the calls of one that has ended end with their connection.
    """
    try:
        await ping(address)
    except DeadlineExceeded:
        return True
    except ForgeError:
        return False
    return False


async def pause() -> None:
    """Wait between two pings of a worker that still has calls."""
    await asyncio.sleep(_PERIOD_S)
