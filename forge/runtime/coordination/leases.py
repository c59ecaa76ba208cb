"""Leases with a local deadline, and registration, which holds one.

A frozen etcd neither renews a lease nor reports it. So each lease has a local deadline: the TTL
less a margin, from the time before the last successful renewal was sent. After it the holder treats
the lease as lost, before another process can take its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from forge.core.errors import Conflict, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.telemetry import log

_MARGIN = 0.2
"""Margin of the local deadline, as a share of the TTL."""
_MAX_PERIOD_S = 2.0
"""Longest time between renewals: after an outage all are back within the grace period."""
RETRY_S = 0.25


class LeaseStore(Protocol):
    """The part of etcd for leases; every method raises Unavailable without an answer."""

    async def grant(self, ttl_s: float, *, timeout_s: float) -> int:
        """Grant a lease; return its id."""

    async def renew(self, lease_id: int, *, timeout_s: float) -> bool:
        """Renew a lease; False if it no longer exists."""

    async def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        """End a lease and delete its keys."""


class EtcdLease:
    """One lease in etcd."""

    def __init__(
        self, store: LeaseStore, lease_id: int, *, ttl_s: float, granted_s: float, clock: Clock
    ) -> None:
        self.lease_id = lease_id
        self.ttl_s = ttl_s
        self._store = store
        self._clock = clock
        self._deadline_s = granted_s + ttl_s * (1 - _MARGIN)
        self._gone = False

    @classmethod
    async def grant(
        cls, store: LeaseStore, *, ttl_s: float, timeout_s: float, clock: Clock = time.monotonic
    ) -> EtcdLease:
        """Grant a lease. Raises Unavailable."""
        granted_s = clock()
        lease_id = await store.grant(ttl_s, timeout_s=timeout_s)
        return cls(store, lease_id, ttl_s=ttl_s, granted_s=granted_s, clock=clock)

    @property
    def alive(self) -> bool:
        """Whether the local deadline is in the future."""
        # A clock, not the event loop's: after a long callback the loop's own time is stale.
        return self.left_s > 0

    @property
    def left_s(self) -> float:
        """Time until the local deadline."""
        return 0.0 if self._gone else max(0.0, self._deadline_s - self._clock())

    @property
    def period_s(self) -> float:
        """Time between two renewals."""
        return min(self.ttl_s / 4, _MAX_PERIOD_S)

    async def renew(self, *, timeout_s: float) -> bool:
        """Renew it; False if it no longer exists. Raises Unavailable without an answer."""
        sent_s = self._clock()
        if not await self._store.renew(self.lease_id, timeout_s=timeout_s):
            self._gone = True
            return False
        self._deadline_s = sent_s + self.ttl_s * (1 - _MARGIN)
        return True

    async def revoke(self) -> None:
        """Revoke it, or let it expire if etcd does not answer."""
        self._gone = True
        with contextlib.suppress(Unavailable):
            await self._store.revoke(self.lease_id, timeout_s=min(self.ttl_s, 2.0))


Clock = Callable[[], float]
OnConflict = Callable[[Conflict], None]
"""Called when another process has taken the key."""


class Registration:
    """A leased entry, e.g. in discovery; entered again after a loss."""

    def __init__(
        self,
        lease: EtcdLease,
        *,
        enter: Callable[[Mapping[str, str]], Awaitable[EtcdLease]],
        write: Callable[[EtcdLease, Mapping[str, str]], Awaitable[None]],
        metadata: Mapping[str, str],
        on_conflict: OnConflict = lambda _: None,
    ) -> None:
        self._lease = lease
        self._on_conflict = on_conflict
        self._enter = enter
        self._write = write
        self._metadata = dict(metadata)
        self._unwritten = False
        self._writing = asyncio.Lock()
        self._task = asyncio.create_task(self._keep())

    @property
    def alive(self) -> bool:
        """Whether others certainly see it; False before the TTL ends if etcd is frozen."""
        return self._lease.alive

    async def update(self, metadata: Mapping[str, str]) -> None:
        """Replace the metadata; during an outage of etcd, after its end."""
        self._metadata = dict(metadata)
        self._unwritten = True
        # The next renewal repeats a failed write.
        with contextlib.suppress(Unavailable, Conflict):
            await self._write_metadata()

    async def close(self) -> None:
        """Leave discovery at once."""
        await self.abandon()
        await self._lease.revoke()

    async def abandon(self) -> None:
        """Stop renewing, as if the process had died: others see it until the TTL ends."""
        await cancel_and_wait(self._task)

    async def _keep(self) -> None:
        outage = conflict = False
        while True:
            await asyncio.sleep(RETRY_S if outage else self._lease.period_s)
            try:
                # The old lease first: etcd extends leases when it restarts, so often all is well.
                if await self._lease.renew(timeout_s=self._lease.period_s):
                    await self._write_metadata()
                else:
                    await self._enter_again()
            except Unavailable as error:
                if not outage:
                    log.warning("lease_not_renewed", error=str(error))
                outage = True
            except Conflict as error:
                outage = False
                if not conflict:
                    log.error("registration_taken", error=str(error))
                    self._on_conflict(error)
                conflict = True
            else:
                outage = conflict = False

    async def _write_metadata(self) -> None:
        async with self._writing:
            if self._unwritten:
                metadata = self._metadata
                await self._write(self._lease, metadata)
                self._unwritten = metadata is not self._metadata

    async def _enter_again(self) -> None:
        async with self._writing:
            metadata = self._metadata
            self._lease = await self._enter(metadata)
            self._unwritten = metadata is not self._metadata
        log.warning("registered_again")
