"""Admission of model calls: the limits on calls in flight, of the gateway, a session and a tenant.

Owns the counts, and the end of admission while the gateway drains. A count of prompt tokens counts
as a call, because it takes the same work of the gateway.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from forge.core.errors import ResourceExhausted, Unavailable
from forge.runtime.security.tokens import Claims
from services.gateway.metrics import CALLS, REFUSED
from services.gateway.tenants import Tenants


class CallAdmission:
    """All calls in flight of this gateway."""

    def __init__(self, *, calls: int, calls_per_session: int, tenants: Tenants) -> None:
        self._most = calls
        self._most_of_session = calls_per_session
        self._tenants = tenants
        self._calls = 0
        self._by_session: Counter[str] = Counter()
        self._draining = False
        self._no_calls = asyncio.Event()
        """Set while no call is in flight."""
        # Read at each scrape, so that a call does no work for it.
        CALLS.set_function(lambda: self._calls)

    @contextmanager
    def admit(self, claims: Claims) -> Iterator[None]:
        """Counts one call for the length of a block. Raises `ResourceExhausted` above a limit,
        `Unavailable` while draining."""
        session = claims.trajectory_id
        self._check(session)
        with self._tenants.admit(claims.tenant):
            self._calls += 1
            # Here, not in the session's actor: calls in its mailbox count too.
            self._by_session[session] += 1
            self._no_calls.clear()
            try:
                yield
            finally:
                self._end(session)

    async def drain(self) -> None:
        """Refuses new calls and waits for those in flight."""
        self._draining = True
        if self._calls:
            await self._no_calls.wait()

    def _check(self, session: str) -> None:
        if self._draining:
            raise Unavailable("this gateway is draining", retry_after_s=0.0)
        if self._calls >= self._most:
            REFUSED.labels("calls").inc()
            raise ResourceExhausted(
                f"{self._calls} calls are in flight, the maximum", retry_after_s=1.0
            )
        of_session = self._by_session.get(session, 0)
        if of_session >= self._most_of_session:
            REFUSED.labels("session_calls").inc()
            raise ResourceExhausted(
                f"session {session} has {of_session} calls in flight, the maximum",
                retry_after_s=1.0,
            )

    def _end(self, session: str) -> None:
        self._calls -= 1
        self._by_session[session] -= 1
        if not self._by_session[session]:
            del self._by_session[session]
        if not self._calls:
            self._no_calls.set()
