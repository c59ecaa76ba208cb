"""Settings of one pool instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from forge.runtime.settings import ServiceConfig
from forge.runtime.settings.agreed import agreed_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The file of the shard and its readers."""

    map_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    """Initial size of the memory map; it doubles when full."""
    map_max_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 40
    """Largest size of the memory map; a full one refuses writes."""
    disk_reserve_bytes: Annotated[int, Meta(ge=0)] = 64 << 20
    """Free disk space below which the pool refuses turns; it keeps this space for seals and batch
    states."""
    reader_threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Threads that read from the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationSettings:
    """The copies of the shard."""

    durability: Literal["local", "replicated"] = "local"
    """local: acknowledges a write once it is on this disk; replicated: once it is also on the disk
    of the other instance."""
    min_copies: Annotated[int, Meta(ge=1, le=2)] = 2
    """replicated: least number of durable copies. Without a follower in sync, 2 refuses writes, 1
    acknowledges a single copy."""
    follower_timeout_s: Annotated[float, Meta(ge=0.1)] = 5.0
    """replicated: longest silence of the follower before the leader drops it."""
    verify_every_s: Annotated[float, Meta(ge=0)] = 24 * 3600.0
    """replicated: pause between two passes that verify every record and repair damaged records from
    the other replica; 0: no passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """Retention of settled groups."""

    mode: Literal["keep", "covered"] = "covered"
    """keep: frees nothing; covered: frees groups that a checkpoint covers, and tombstoned or
    evaluated ones, by keep_age_s and keep_bytes."""
    keep_age_s: Annotated[float, Meta(ge=0)] = 7 * 24 * 3600.0
    """Time for which a settled group keeps its turns and rewards, unless space runs short."""
    keep_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of all records above which the oldest are freed at any age; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(ServiceConfig):
    """One shard of the data pool: groups, trajectories and rewards, durable in LMDB."""

    data_dir: str = ".forge/pool"
    """Directory of the shard; only one instance may use it."""
    shard: str = ""
    """Name of the shard; empty: the name in data_dir, generated at the first start."""
    max_turn_bytes: Annotated[int, Meta(ge=1 << 20)] = 64 << 20
    """Largest turn accepted, serialized."""
    max_agent_rewards: Annotated[int, Meta(ge=0)] = 1024
    """Most rewards that an agent writes about itself in one trajectory (`agent_rewards` of its
    task); 0: no limit."""
    store: StoreSettings = field(default_factory=StoreSettings)
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)

    @property
    def replicated(self) -> bool:
        """Whether the shard has two instances."""
        return self.replication.durability == "replicated"

    def agreed(self) -> Mapping[str, str]:
        """A follower that is elected keeps its shard's guarantees."""
        if not self.replicated:
            return {}
        keys = ("replication.min_copies", "retention", "max_turn_bytes")
        return agreed_settings(f"pool {self.shard}", self, *keys)
