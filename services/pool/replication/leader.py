"""The leader of a shard: its gate, its follower, and the set of replicas in sync.

Owns the admission of a follower and the steps when it joins or leaves. The order of these steps
guarantees that no acknowledged write is lost: answers wait for a follower before it is recorded as
in sync, and it is recorded as out of sync before anything is acknowledged without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace

from forge.core.errors import (
    FailedPrecondition,
    ForgeError,
    InvalidArgument,
    ResourceExhausted,
    StaleFence,
    Unavailable,
)
from forge.runtime.concurrency.tasks import cancel_and_wait, first_done
from forge.runtime.coordination import Coordinator, Leadership
from forge.runtime.telemetry import log
from forge.v1 import replica_pb2 as pb
from services.pool.config import PoolConfig
from services.pool.metrics import REPLICAS_IN_SYNC
from services.pool.readers import ReaderThreads
from services.pool.replication.ack_gate import RETRY_S, AckGate
from services.pool.replication.follower_link import Link
from services.pool.replication.replica_set import ReplicaSet, leadership_name
from services.pool.storage.environment.lmdb_env import DISK_RETRY_S
from services.pool.storage.journal import Changes, ReplicaState
from services.pool.store import PoolStore

BOTH = 2


class Leader:
    """The shard's leader: acknowledges writes once enough replicas have them."""

    def __init__(
        self,
        config: PoolConfig,
        coordinator: Coordinator,
        leadership: Leadership,
        members: ReplicaSet,
        store: PoolStore,
        readers: ReaderThreads,
        *,
        state: ReplicaState,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when `copies` or `refusal` may have changed."""
        self.deposed = asyncio.Event()
        """Set once another instance leads, or may lead."""
        self.gate = AckGate(
            store.shard, position=state.position, leads=lambda: not self.deposed.is_set()
        )
        self.members = members
        self.leadership = leadership
        self._config = config
        self._coordinator = coordinator
        self._store = store
        self._readers = readers
        self._state = state
        self._own_id = state.replica_id
        self._on_change = on_change
        self._recording = asyncio.Lock()
        self._link: Link | None = None
        self._attending: asyncio.Task[None] | None = None
        self._no_room = ""
        """Reason why the follower could not store commits, if its disk is full."""

    async def begin(self) -> None:
        """Rewrites the record under this leader's fence. Raises StaleFence."""
        await self._record(self.members)
        await self._be_without_follower("no follower has joined")

    async def hold(self) -> None:
        """Keeps the leadership; returns once deposed.

        During an outage of etcd no replica can be elected, and acknowledgements rest on the
        follower or on the record, not on the lease. So a lost lease ends nothing: the leader
        campaigns again, and a replica elected meanwhile has changed the record.
        """
        while not self.deposed.is_set():
            await first_done(self.leadership.lost(), self.deposed.wait())
            if not self.deposed.is_set():
                log.warning("lease_lost", pool_shard=self._store.shard)
                await self._regain()
        self._no_room = ""
        self.gate.shut("another instance leads it")

    @property
    def copies(self) -> int:
        """Number of connected replicas that have every acknowledged write, this one included."""
        return len(self.members.in_sync) if self.gate.required and not self.gate.is_shut else 1

    @property
    def refusal(self) -> str:
        """Reason why the shard refuses changes; "" if it accepts them."""
        if self.gate.is_shut and self._no_room:
            return f"its follower has no room ({self._no_room})"
        return self.gate.refusal

    async def _regain(self) -> None:
        campaign = asyncio.create_task(
            self._coordinator.campaign(
                leadership_name(self._store.shard),
                self._config.instance_id,
                ttl_s=self._config.lease_ttl_s,
            )
        )
        try:
            while not self.deposed.is_set():
                await asyncio.wait({campaign}, timeout=RETRY_S)
                with contextlib.suppress(Unavailable, StaleFence):
                    await self._look_at_record()
                    if campaign.done():
                        self.leadership = campaign.result()
                        await self._record(replace(self.members, fence=self.leadership.fence))
                        log.info("lease_regained", fence=self.leadership.fence)
                        return
                if campaign.done():
                    # Elected, and etcd is unreachable again.
                    await asyncio.sleep(RETRY_S)
            if campaign.done():
                await campaign.result().resign()
        finally:
            await cancel_and_wait(campaign)

    def admit(self) -> None:
        """Raises `ResourceExhausted` if the required follower has no room, `Unavailable` for any
        other change that cannot be acknowledged."""
        if self.gate.is_shut and self._no_room:
            raise ResourceExhausted(
                f"the follower of pool shard {self._store.shard} has no room: {self._no_room}",
                retry_after_s=DISK_RETRY_S,
            )
        self.gate.admit()

    def check_readable(self) -> None:
        """Raises `Unavailable` if another instance may lead by now and have newer data."""
        if self.gate.is_shut and not self.leadership.alive:
            raise Unavailable(f"whether this instance still leads {self._store.shard} is in doubt")

    def committed(self, position: int, changes: Changes) -> None:
        """Adds a commit to the gate and to the follower's link."""
        self.gate.position = position
        if self._link is not None:
            self._link.add(position, changes)

    async def follower_with(self, position: int) -> str:
        """Address of the follower, once it has every commit up to `position`. Raises
        `Unavailable` while none has caught up, or when it goes."""
        link = self._link
        if link is None or not link.confirmed or not link.address:
            raise Unavailable(f"pool shard {self._store.shard} has no follower in sync")
        await link.reached(position)
        return link.address

    def accept(self, follower: pb.FollowerState) -> Link:
        """Admits a follower. Raises as `Follow` in replica.proto specifies."""
        self._check(follower)
        if self._link is not None:
            if self._link.replica_id == follower.replica_id:
                self._link.end(Unavailable("the follower connected again"))
            raise ResourceExhausted(
                f"pool shard {self._store.shard} has a follower", retry_after_s=RETRY_S
            )
        self._no_room = follower.no_room
        self._link = link = Link(
            self._store,
            self._readers,
            follower,
            lineage=self.members.lineage,
            term=self.leadership.fence,
            position=self.gate.position,
            timeout_s=self._config.replication.follower_timeout_s,
            on_confirmed=self._confirmed,
        )
        if follower.no_room:
            self._show()
        self._attending = asyncio.create_task(self._attend(link), name="follower")
        return link

    def _check(self, follower: pb.FollowerState) -> None:
        """Raises for a replica whose data cannot follow this shard."""
        if follower.pool_shard != self._store.shard:
            raise InvalidArgument(
                f"pool_shard {follower.pool_shard!r} is not led here: this is {self._store.shard!r}"
            )
        if follower.lineage not in ("", self.members.lineage):
            raise FailedPrecondition(
                f"replica {follower.replica_id} holds data of lineage {follower.lineage!r}, and "
                f"pool shard {self._store.shard} is of {self.members.lineage!r}: give the follower "
                "an empty data_dir"
            )
        if follower.schema_version != self._state.schema_version:
            raise FailedPrecondition(
                f"replica {follower.replica_id} stores schema {follower.schema_version}, the "
                f"leader {self._state.schema_version}: run the same version on both"
            )
        if follower.newest_term > self.leadership.fence:
            # Its commits may be acknowledged, and older records here would overwrite them.
            raise FailedPrecondition(
                f"replica {follower.replica_id} knows of leadership {follower.newest_term} of pool "
                f"shard {self._store.shard}, later than {self.leadership.fence} of this instance: "
                "etcd was restored from an older snapshot, and that replica may have more; see "
                "docs/runbooks/backup_restore.md"
            )

    async def close(self) -> None:
        """Ends the link; the follower stays in sync, as it has every acknowledged write."""
        self._no_room = ""
        self.gate.shut("its leader stops")
        if self._link is not None:
            self._link.end(Unavailable("the leader of the shard stops"))
        await cancel_and_wait(self._attending)

    def _confirmed(self, position: int) -> None:
        self._store.confirmed_position = position
        self.gate.confirm(position)

    async def _attend(self, link: Link) -> None:
        """Serves one follower until it is lost."""
        try:
            # Its first confirmation says that it has caught up.
            await link.reached(0)
            self.gate.require(link.confirmed)
            await link.reached(self.gate.position)
            await self._set_in_sync({self._own_id, link.replica_id})
            self.gate.open()
            self._no_room = ""
            self._show()
            log.info("follower_in_sync", replica=link.replica_id, position=link.confirmed)
            why = await link.ended
        except ForgeError as error:
            why = error
        link.end(why)
        log.warning("follower_lost", replica=link.replica_id, error=str(why))
        try:
            await self._be_without_follower(f"its follower is not connected ({why})")
        except StaleFence as error:
            self.gate.shut(str(error))
        finally:
            self._link = None

    async def _be_without_follower(self, why: str) -> None:
        if self._config.replication.min_copies == BOTH:
            self.gate.shut(f"{why}, and replication.min_copies is {BOTH}")
        else:
            # The record first: a follower that lacks commits must never lead.
            await self._set_in_sync({self._own_id})
            self.gate.go_alone()
        self._show()

    def _show(self) -> None:
        REPLICAS_IN_SYNC.set(self.copies)
        self._on_change()

    async def _set_in_sync(self, replica_ids: Iterable[str]) -> None:
        """Raises StaleFence if this replica no longer leads."""
        wanted = frozenset(replica_ids)
        while self.members.in_sync != wanted:
            try:
                await self._record(self.members.of(wanted))
            except Unavailable as error:
                log.warning("replicas_not_recorded", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _record(self, members: ReplicaSet) -> None:
        """Raises `StaleFence` when another instance has written, `Unavailable` when the outcome is
        unknown: then look at the record before anything else."""
        async with self._recording:
            try:
                self.members = await members.write(self._coordinator)
            except StaleFence:
                # After a write of unknown outcome the newer record may be our own.
                await self._look_at_record()
                if self.members.in_sync != members.in_sync or self.members.fence != members.fence:
                    raise Unavailable("the record of replicas has changed: try again") from None

    async def _look_at_record(self) -> None:
        """Raises `StaleFence`, and is deposed, when another instance has written since."""
        found = await ReplicaSet.read(self._coordinator, self._store.shard)
        if found is None or found.fence not in (self.members.fence, self.leadership.fence):
            self.deposed.set()
            raise StaleFence(f"pool shard {self._store.shard} is led by another instance")
        self.members = found
