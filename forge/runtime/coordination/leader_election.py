"""Leader election: one leader of a name at a time, by a leased key in etcd."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from forge.core.errors import Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination.etcd import Etcd
from forge.runtime.coordination.leases import RETRY_S, Lease
from forge.runtime.telemetry import log


async def elect(etcd: Etcd, name: str, instance_id: str, *, ttl_s: float) -> Leadership:
    """Wait until elected leader of `name`; an outage of etcd prolongs the wait."""
    key = f"leader/{name}"
    outage = False
    while True:
        async with aclosing(etcd.follow(key)) as holders:
            async for holder in holders:
                if holder is None:
                    break
        try:
            lease = await Lease.grant(etcd, ttl_s=ttl_s, timeout_s=ttl_s)
            try:
                fence = await etcd.swap(
                    key, instance_id.encode(), expected_revision=0, lease_id=lease.lease_id
                )
            except (Unavailable, asyncio.CancelledError):
                # The outcome is unknown; revoking the lease deletes the key.
                await lease.revoke()
                raise
            if fence is not None:
                return Leadership(lease, name=name, fence=fence)
            outage = False
            await lease.revoke()
        except Unavailable as error:
            if not outage:
                log.warning("election_interrupted", name=name, error=str(error))
            outage = True
            await asyncio.sleep(RETRY_S)


class Leadership:
    """Leadership of a name until lost or resigned; to regain it, campaign again."""

    def __init__(self, lease: Lease, *, name: str, fence: int) -> None:
        self.fence = fence
        """Grows with every leader of the name; a write that carries an older one is refused."""
        self._name = name
        self._lease = lease
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    @property
    def alive(self) -> bool:
        """Whether it leads; False before another can be elected, even if etcd is frozen."""
        return self._lease.alive and not self._ended.is_set()

    async def lost(self) -> None:
        """Wait for the end of leadership."""
        await self._ended.wait()

    async def resign(self) -> None:
        """End it now; the next election need not wait for the TTL."""
        await self.abandon()
        await self._lease.revoke()

    async def abandon(self) -> None:
        """End it as if the process had died: the next election waits for the TTL."""
        await cancel_and_wait(self._task)
        # A task cancelled before its first step has set nothing.
        self._ended.set()

    async def _keep(self) -> None:
        try:
            await self._renew()
        finally:
            # On every end: `lost` must return.
            self._ended.set()
        log.warning("leadership_lost", name=self._name, fence=self.fence)
        # etcd may thaw before the lease expires: free the name.
        await self._lease.revoke()

    async def _renew(self) -> None:
        """Returns when the lease is over."""
        pause_s = self._lease.period_s
        while True:
            await asyncio.sleep(min(pause_s, self._lease.left_s))
            if not self._lease.alive:
                return
            try:
                if not await self._lease.renew(timeout_s=self._lease.left_s):
                    return
                pause_s = self._lease.period_s
            except Unavailable:
                pause_s = RETRY_S
