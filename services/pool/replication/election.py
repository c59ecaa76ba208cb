"""The election of a replica to leader of its shard, and the exit of a shard from replication.

Owns the campaign and the check that this replica has every acknowledged write. The record of
replicas in sync is `replica_set`'s, the store that a shard's name belongs to `shard_identity`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from forge.core.errors import ConfigError, Unavailable
from forge.runtime.coordination import Coordinator, Leadership
from forge.runtime.coordination.shard_record import read_record
from forge.runtime.telemetry import log
from services.pool.config import PoolConfig
from services.pool.readers import ReaderThreads
from services.pool.replication.ack_gate import RETRY_S
from services.pool.replication.replica_set import ReplicaSet, leadership_name, may_lead
from services.pool.replication.shard_identity import may_serve
from services.pool.storage.journal import is_empty, leave_replication, replica_state
from services.pool.storage.records import Records
from services.pool.store import PoolStore

T = TypeVar("T")


class ReplicaElection:
    """The campaign of one replica."""

    def __init__(
        self, coordinator: Coordinator, store: PoolStore, readers: ReaderThreads, config: PoolConfig
    ) -> None:
        self._coordinator = coordinator
        self._store = store
        self._readers = readers
        self._config = config

    async def win(self) -> tuple[Leadership, ReplicaSet]:
        """Campaigns while this replica has every acknowledged write; returns once elected."""
        if await self._is_first_and_empty():
            # A replica that has data may be about to start: it goes first.
            await asyncio.sleep(self._config.lease_ttl_s)
        is_logged = False
        while True:
            # An outage of etcd only prolongs it.
            with suppress(Unavailable):
                eligible, members = await self._standing()
                if members is None and not eligible and not is_logged:
                    is_logged = True
                    log.error(
                        "replicas_unknown",
                        pool_shard=self._store.shard,
                        error="etcd has no record of the replicas in sync: start the replica that "
                        'shall continue, once, with replication.durability = "local"',
                    )
                if eligible:
                    elected = await self._campaign()
                    if elected is not None:
                        return elected
            await asyncio.sleep(RETRY_S)

    async def _campaign(self) -> tuple[Leadership, ReplicaSet] | None:
        """None when the replica lost its standing before it was elected. Raises Unavailable."""
        leadership = await self._coordinator.campaign(
            leadership_name(self._store.shard),
            self._config.instance_id,
            ttl_s=self._config.lease_ttl_s,
        )
        try:
            eligible, members = await self._standing()
            if eligible:
                members = members or await self._first_set()
                terms = (await self._read(replica_state)).terms
                known = max((term for term, _ in terms), default=0)
                # Below it, if etcd was restored from an older snapshot.
                await leadership.raise_above(max(known, members.fence))
                return leadership, replace(members, fence=leadership.fence)
        except BaseException:
            await leadership.resign()
            raise
        await leadership.resign()
        return None

    async def _first_set(self) -> ReplicaSet:
        """The first record of a shard."""
        state = await self._read(replica_state)
        return ReplicaSet(
            shard=self._store.shard,
            lineage=self._store.lineage(),
            in_sync=frozenset({state.replica_id}),
            fence=0,
        )

    async def _standing(self) -> tuple[bool, ReplicaSet | None]:
        """Whether this replica may lead, and the record that says so. Raises Unavailable."""
        binding, _ = await read_record(self._coordinator, self._store.shard)
        is_bound = await asyncio.to_thread(may_serve, binding, self._store, replicated=True)
        members = await ReplicaSet.read(self._coordinator, self._store.shard)
        return is_bound and may_lead(members, await self._read(replica_state)), members

    async def _is_first_and_empty(self) -> bool:
        with suppress(Unavailable):
            _, members = await self._standing()
            return members is None and await self._read(is_empty)
        return True

    async def _read(self, look: Callable[[Records], T]) -> T:
        return await self._readers.run(partial(self._store.read, look))


async def serve_alone(coordinator: Coordinator, store: PoolStore) -> None:
    """Takes a shard that was replicated out of its replica set, to be served by itself.

    Raises `Unavailable` while another instance leads it, `ConfigError` when another replica has
    what this one lacks.
    """
    if not (await asyncio.to_thread(store.read, replica_state)).lineage:
        return
    state = await asyncio.to_thread(store.identify)
    leader = await coordinator.get(f"leader/{leadership_name(store.shard)}")
    if leader is not None:
        raise Unavailable(
            f'replication.durability = "local": pool shard {store.shard} is led by '
            f"{leader.value.decode()}; stop that first"
        )
    members = await ReplicaSet.read(coordinator, store.shard)
    if state.copying or not (members is None or may_lead(members, state)):
        raise ConfigError(
            f'replication.durability = "local": this replica of pool shard {store.shard} may lack '
            "what another has acknowledged; serve that one, or, if it is lost, delete the key "
            f"pool/{store.shard}/replicas of the cluster in etcd to continue with this one"
        )
    known = members or ReplicaSet(
        shard=store.shard, lineage=state.lineage, in_sync=frozenset(), fence=0
    )
    await known.of({state.replica_id}).write(coordinator)
    await asyncio.to_thread(store.write, leave_replication)
    log.warning("left_replica_set", pool_shard=store.shard)
