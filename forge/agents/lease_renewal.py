"""Renews the task leases of a runner on a separate thread: the runner's heartbeat.

Owns the interval of renewals, and stops them if the runner makes no progress. Agents run on the
runner's event loop. An agent that blocks the loop delays the other rollouts, but no lease is lost,
because the thread continues. After `patience_s` of a blocked loop the renewals stop, the leases
expire, and other runners get the rollouts.

The thread needs the interpreter's lock. A C extension that keeps the lock for longer than a lease
still stops the renewals.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from forge.core.errors import ForgeError, PermissionDenied, Unauthenticated
from forge.runtime.concurrency.futures import settle
from forge.runtime.rpc.chunks import batched
from forge.runtime.telemetry import log

RENEW_BATCH = 4096
PAUSE_S = 1.0
"""Pause before a failed renewal is repeated."""
BLOCKED_S = 5.0
"""Time without progress after which a blocked event loop is logged."""

Renew = Callable[[Sequence[str]], Sequence[str]]
"""Blocking call that renews leases and returns the lost ones. Raises `ForgeError`."""


class LeaseRenewal:
    """The task leases of a runner, each renewed three times before it would expire."""

    def __init__(
        self, renew: Renew, *, on_lost: Callable[[Sequence[str]], None], patience_s: float
    ) -> None:
        """`on_lost` is called on the event loop."""
        self._renew = renew
        self._on_lost = on_lost
        self._patience_s = patience_s
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._leases_s: dict[str, float] = {}
        """Duration by lease id."""
        self._due = False
        self._closed = False
        self._unheard_since_s: float | None = None
        """Time of the call to the event loop that has no answer yet."""

    def add(self, lease_id: str, *, lease_s: float) -> None:
        """Starts to renew a lease."""
        with self._changed:
            self._leases_s[lease_id] = lease_s
            self._changed.notify()

    def drop(self, lease_ids: Iterable[str]) -> None:
        """Stops to renew leases."""
        with self._changed:
            for lease_id in lease_ids:
                self._leases_s.pop(lease_id, None)

    def renew_now(self) -> None:
        """Renews all leases at once."""
        with self._changed:
            self._due = True
            self._changed.notify()

    async def run(self) -> None:
        """Renews until cancelled. Raises `Unauthenticated` and `PermissionDenied`, which no retry
        can repair."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        # A daemon: a call to a dead scheduler must not delay the end of the process.
        threading.Thread(
            target=self._work, args=(loop, ended), name="lease-renewal", daemon=True
        ).start()
        try:
            await ended
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify()

    def _work(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        failure: BaseException | None = None
        pause_s: float | None = None
        try:
            while (lease_ids := self._next(pause_s)) is not None:
                pause_s = None if self._renewed(loop, lease_ids) else PAUSE_S
        except BaseException as error:
            failure = error
        _post(loop, settle, ended, failure)

    def _next(self, pause_s: float | None) -> list[str] | None:
        """Waits for the next renewal; returns the lease ids, None at the end.

        `pause_s`: pause after a failed renewal; None after a success.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._leases_s)
            if pause_s is None:
                pause_s = min(self._leases_s.values(), default=0.0) / 3
            self._changed.wait_for(lambda: self._closed or self._due, pause_s)
            self._due = False
            return None if self._closed else list(self._leases_s)

    def _renewed(self, loop: asyncio.AbstractEventLoop, lease_ids: Sequence[str]) -> bool:
        """Renews all leases, unless the event loop is blocked for too long; False: retry soon."""
        if not self._is_responsive(loop):
            return True
        try:
            for batch in batched(lease_ids, RENEW_BATCH):
                if lost := self._renew(batch):
                    _post(loop, self._on_lost, lost)
        except (Unauthenticated, PermissionDenied):
            raise
        except ForgeError as error:
            log.warning("scheduler_unreachable", method="RenewRollouts", error=str(error))
            return False
        return True

    def _is_responsive(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns True if the event loop has run within `patience_s`; calls it to find out."""
        now_s = time.monotonic()
        with self._changed:
            since_s = self._unheard_since_s
            if since_s is None:
                self._unheard_since_s = now_s
        if since_s is None:
            _post(loop, self._answered)
            return True
        silent_s = now_s - since_s
        given_up = silent_s >= self._patience_s
        if given_up or silent_s >= BLOCKED_S:
            log.warning("event_loop_blocked", for_s=round(silent_s, 1), leases_given_up=given_up)
        return not given_up

    def _answered(self) -> None:
        with self._changed:
            self._unheard_since_s = None


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    # A closed loop needs no callbacks.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
