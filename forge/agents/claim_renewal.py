"""Renews the claims of a runner on a thread of its own.

Owns the pace of renewals, and stops them where the runner makes no progress. Agents run on the
runner's event loop. One that blocks it, by a long calculation or a call that waits, costs the other
rollouts time, and no rollout its claim: the thread renews meanwhile. A loop that has not run for
`patience_s` is given up: its claims are no longer renewed, and other runners get the rollouts.

A thread shares the interpreter's lock. Code that holds the lock for longer than a lease, inside one
call of a C extension, still stops the renewals.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from forge.core.errors import ForgeError, PermissionDenied, Unauthenticated
from forge.runtime.telemetry import log

RENEW_BATCH = 4096
PAUSE_S = 1.0
"""Before renewals that failed are sent again."""
BLOCKED_S = 5.0
"""An event loop that has not run for so long is worth a line in the log."""

Renew = Callable[[Sequence[str]], Sequence[str]]
"""Renews these claims, blocking, and returns those that are lost. Raises `ForgeError`."""


class ClaimRenewal:
    """The claims that a runner holds, each renewed three times per lease."""

    def __init__(
        self, renew: Renew, *, on_lost: Callable[[Sequence[str]], None], patience_s: float
    ) -> None:
        """`on_lost` is called on the event loop."""
        self._renew = renew
        self._on_lost = on_lost
        self._patience_s = patience_s
        self._changed = threading.Condition()
        """Guards what follows."""
        self._leases_s: dict[str, float] = {}
        """By claim, how long it lasts."""
        self._due = False
        self._closed = False
        self._unheard_since_s: float | None = None
        """When the event loop was called that has not answered yet."""

    def add(self, lease_id: str, *, lease_s: float) -> None:
        """Renew this claim from now on."""
        with self._changed:
            self._leases_s[lease_id] = lease_s
            self._changed.notify()

    def drop(self, lease_ids: Iterable[str]) -> None:
        """Renew these claims no longer."""
        with self._changed:
            for lease_id in lease_ids:
                self._leases_s.pop(lease_id, None)

    def renew_now(self) -> None:
        """Renew all claims before it is time."""
        with self._changed:
            self._due = True
            self._changed.notify()

    async def run(self) -> None:
        """Renew until cancelled. Raises `Unauthenticated` and `PermissionDenied`: no waiting mends
        a wrong key."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        # A daemon: a call that waits for a dead scheduler must not delay the end of the process.
        threading.Thread(
            target=self._work, args=(loop, ended), name="claim-renewal", daemon=True
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
        _post(loop, _end, ended, failure)

    def _next(self, pause_s: float | None) -> list[str] | None:
        """The claims to renew, once it is time; None at the end.

        `pause_s` is how soon that is after renewals that failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._leases_s)
            if pause_s is None:
                pause_s = min(self._leases_s.values(), default=0.0) / 3
            self._changed.wait_for(lambda: self._closed or self._due, pause_s)
            self._due = False
            return None if self._closed else list(self._leases_s)

    def _renewed(self, loop: asyncio.AbstractEventLoop, lease_ids: Sequence[str]) -> bool:
        """Renew them all, unless the event loop has been silent for too long; False: to be tried
        again soon."""
        if not self._heard(loop):
            return True
        try:
            for start in range(0, len(lease_ids), RENEW_BATCH):
                lost = self._renew(lease_ids[start : start + RENEW_BATCH])
                if lost:
                    _post(loop, self._on_lost, lost)
        except (Unauthenticated, PermissionDenied):
            raise
        except ForgeError as error:
            log.warning("scheduler_away", method="RenewRollouts", error=str(error))
            return False
        return True

    def _heard(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the event loop has run within the patience; calls it to find out."""
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
            log.warning("event_loop_blocked", for_s=round(silent_s, 1), claims_given_up=given_up)
        return not given_up

    def _answered(self) -> None:
        with self._changed:
            self._unheard_since_s = None


def _end(ended: asyncio.Future[None], failure: BaseException | None) -> None:
    if ended.done():
        return
    if failure is None:
        ended.set_result(None)
    else:
        ended.set_exception(failure)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    # A loop that is closed needs to know nothing any more.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
