"""Which replicas of a shard have everything that was acknowledged: one small record in etcd.

Owns the record and the rule who may lead by it. Only the leader of the shard changes it, by
compare-and-swap, and always *before* it acknowledges anything by the new set: so whoever is in it
may lead, and nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from forge.runtime.coordination import Coordinator
from services.pool.storage.journal import ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSet:
    """The replicas of one shard."""

    shard: str
    lineage: str
    """Drawn when the shard is first replicated: data of another lineage is of another shard."""
    in_sync: frozenset[str]
    """Ids of the replicas that have all that was acknowledged."""
    fence: int
    """Of the leader that wrote the record."""
    revision: int = 0
    """In etcd; 0 before it is written."""

    @classmethod
    async def read(cls, coordinator: Coordinator, shard: str) -> ReplicaSet | None:
        """None when the shard was never replicated. Raises Unavailable."""
        stored = await coordinator.get(_key(shard))
        if stored is None:
            return None
        fields = json.loads(stored.value)
        return cls(
            shard=shard,
            lineage=fields["lineage"],
            in_sync=frozenset(fields["in_sync"]),
            fence=fields["fence"],
            revision=stored.mod_revision,
        )

    async def write(self, coordinator: Coordinator) -> ReplicaSet:
        """The set as it stands then. Raises StaleFence when somebody else wrote since, Unavailable
        when the outcome is unknown."""
        fields = {"lineage": self.lineage, "in_sync": sorted(self.in_sync), "fence": self.fence}
        revision = await coordinator.compare_and_swap(
            _key(self.shard), json.dumps(fields).encode(), expected_revision=self.revision
        )
        return replace(self, revision=revision)

    def of(self, replica_ids: Iterable[str]) -> ReplicaSet:
        """The same with other members."""
        return replace(self, in_sync=frozenset(replica_ids))


def may_lead(members: ReplicaSet | None, state: ReplicaState) -> bool:
    """Whether a replica has all that was acknowledged. Without a record, only one that was never
    replicated has: a record that is gone could have named others."""
    if state.copying:
        return False
    if members is None:
        return not state.lineage
    return state.replica_id in members.in_sync and state.lineage in ("", members.lineage)


def leadership_name(shard: str) -> str:
    """What instances of a shard campaign for."""
    return f"pool/{shard}"


def _key(shard: str) -> str:
    return f"pool/{shard}/replicas"
