"""Leader election: one leader of a name at a time, by a leased key in etcd.

    leader/<name>    the leader; the revision of this key is its fence
    <name>/fence     a higher fence that a leader took instead

Owns the fence. An etcd that was restored from an older snapshot has lower revisions, and does not
know the leaders since then. A store that has seen one of these passes the fence to `raise_above`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from forge.core.errors import Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination.etcd import Etcd
from forge.runtime.coordination.leases import RETRY_S, EtcdLease
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
            lease = await EtcdLease.grant(etcd, ttl_s=ttl_s, timeout_s=ttl_s)
            try:
                revision = await etcd.swap(
                    key, instance_id.encode(), expected_revision=0, lease_id=lease.lease_id
                )
                if revision is not None:
                    fence = max(revision, await _stored_fence(etcd, name) + 1)
                    if fence == revision or await _take(etcd, name, fence, revision=revision):
                        return Leadership(etcd, lease, name=name, fence=fence, revision=revision)
            except (Unavailable, asyncio.CancelledError):
                # The outcome is unknown; revoking the lease deletes the key.
                await lease.revoke()
                raise
            outage = False
            await lease.revoke()
        except Unavailable as error:
            if not outage:
                log.warning("election_interrupted", name=name, error=str(error))
            outage = True
            await asyncio.sleep(RETRY_S)


class Leadership:
    """Leadership of a name until lost or resigned; to regain it, campaign again."""

    def __init__(
        self, etcd: Etcd, lease: EtcdLease, *, name: str, fence: int, revision: int
    ) -> None:
        """`revision`: of the leader's key."""
        self.fence = fence
        """Grows with every leader of the name; a write that carries an older one is refused."""
        self._etcd = etcd
        self._revision = revision
        self._raising = asyncio.Lock()
        self._name = name
        self._lease = lease
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    @property
    def alive(self) -> bool:
        """Whether it leads; False before another can be elected, even if etcd is frozen."""
        return self._lease.alive and not self._ended.is_set()

    async def raise_above(self, floor: int) -> None:
        """Take a fence above `floor`, the fence of a leader that etcd may have forgotten. Raises
        Unavailable without leadership.

        Only the present leader can: a leader that was deposed while it slept stays below the next
        one, which has stored its own fence, or has a later revision.
        """
        async with self._raising:
            if floor < self.fence:
                return
            raised = floor + 1
            taken = self.alive and await _take(
                self._etcd, self._name, raised, revision=self._revision
            )
            if not taken:
                raise Unavailable(f"this instance no longer leads {self._name}")
            log.warning("fence_raised", name=self._name, before=self.fence, fence=raised)
            self.fence = raised

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


def _fence_key(name: str) -> str:
    return f"{name}/fence"


async def _take(etcd: Etcd, name: str, fence: int, *, revision: int) -> bool:
    """Store a fence, if the leader's key still has this revision."""
    value = str(fence).encode()
    return await etcd.put_while(
        _fence_key(name), value, unchanged=f"leader/{name}", revision=revision
    )


async def _stored_fence(etcd: Etcd, name: str) -> int:
    stored = await etcd.get(_fence_key(name))
    return 0 if stored is None else int(stored.value)
