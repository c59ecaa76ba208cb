"""The replicas of a shard that have every acknowledged write: one small record in etcd.

Owns the record and its rule: every member may lead, and no other replica. Only the leader changes
it, by compare-and-swap, and before it acknowledges anything under the new set.
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
    """Identity of the store; data of another lineage belongs to another shard."""
    in_sync: frozenset[str]
    """Ids of the replicas that have every acknowledged write."""
    fence: int
    """Fence of the leader that wrote the record."""
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
        """The set as written. Raises StaleFence if another instance wrote since, Unavailable if the
        outcome is unknown."""
        fields = {"lineage": self.lineage, "in_sync": sorted(self.in_sync), "fence": self.fence}
        revision = await coordinator.compare_and_swap(
            _key(self.shard), json.dumps(fields).encode(), expected_revision=self.revision
        )
        return replace(self, revision=revision)

    def of(self, replica_ids: Iterable[str]) -> ReplicaSet:
        """This set with other members."""
        return replace(self, in_sync=frozenset(replica_ids))


def may_lead(members: ReplicaSet | None, state: ReplicaState) -> bool:
    """True if a replica has every acknowledged write. Without a record only a replica that was
    never replicated may lead: a deleted record could have named others."""
    if state.copying:
        return False
    if members is None:
        return not state.lineage
    return state.replica_id in members.in_sync and state.lineage in ("", members.lineage)


def leadership_name(shard: str) -> str:
    """The name under which instances of a shard campaign."""
    return f"pool/{shard}"


def _key(shard: str) -> str:
    return f"pool/{shard}/replicas"
