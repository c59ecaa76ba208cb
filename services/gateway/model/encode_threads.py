"""Threads for long requests, shared fairly: tenants take turns, independent of the number of their
calls.

Owns the queue and the threads. A session asks for one call at a time, so the calls of a tenant are
those of its sessions, in order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Tenant:
    """The calls of one tenant."""

    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    running: int = 0
    begun: int = 0
    """Number of the call that began last; 0: none has."""

    @property
    def first(self) -> asyncio.Future[None] | None:
        """The turn of the call that has waited longest. A call that was just cancelled has not left
        the queue yet."""
        return next((turn for turn in self.waiting if not turn.cancelled()), None)


class EncodeThreads:
    """A bounded number of threads."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "encode")
        self._free = threads
        self._tenants: dict[str, _Tenant] = {}
        """Tenants with running or waiting calls."""
        self._begun = 0
        """Calls that have begun."""

    @property
    def queued(self) -> int:
        """Number of waiting calls."""
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Returns the result of `work`, on a thread, when it is the tenant's turn."""
        caller = self._tenants.setdefault(tenant, _Tenant())
        if self._free:
            self._free -= 1
            self._begin(caller)
        else:
            await self._turn(tenant, caller)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        # The thread is busy to the end of the work, also of a cancelled call.
        running.add_done_callback(lambda _: self._end(tenant, caller))
        try:
            return await asyncio.shield(running)
        finally:
            # An error's traceback has this frame: no cycle, as in `ActorRef.ask`.
            del running

    def close(self) -> None:
        """Drops the calls that have not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str, caller: _Tenant) -> None:
        turn = asyncio.get_running_loop().create_future()
        caller.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                caller.waiting.remove(turn)
                self._forget(tenant, caller)
            else:
                self._end(tenant, caller)
            raise

    def _begin(self, caller: _Tenant) -> None:
        caller.running += 1
        self._begun += 1
        caller.begun = self._begun

    def _end(self, tenant: str, caller: _Tenant) -> None:
        """Ends a call; its thread goes to the tenant with the fewest running calls, or the one that
        has not begun any for the longest time."""
        caller.running -= 1
        waiting = [one for one in self._tenants.values() if one.first is not None]
        following = min(waiting, key=lambda one: (one.running, one.begun), default=None)
        if following is not None and (turn := following.first) is not None:
            self._begin(following)
            following.waiting.remove(turn)
            turn.set_result(None)
        else:
            self._free += 1
        self._forget(tenant, caller)

    def _forget(self, tenant: str, caller: _Tenant) -> None:
        if not caller.running and not caller.waiting:
            self._tenants.pop(tenant, None)
