"""Settings of one pool instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from forge.runtime.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(ServiceConfig):
    """One shard of the data pool: groups, trajectories and rewards, durable in LMDB."""

    data_dir: str = ".forge/pool"
    """Directory of the shard; one instance may use it."""
    shard: str = ""
    """Name of the shard; empty: the one kept in data_dir, drawn at first start."""
    map_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    """Size of the memory map at first; it doubles when full."""
    map_max_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 40
    """Size the shard may grow to; then writes are refused."""
    disk_reserve_bytes: Annotated[int, Meta(ge=0)] = 64 << 20
    """Free space below which turns are refused, kept for seals and batch states."""
    durability: Literal["local", "replicated"] = "local"
    """local: a write is acknowledged once it is on this disk; replicated: once it is on the other
    instance's disk, too."""
    min_copies: Annotated[int, Meta(ge=1, le=2)] = 2
    """replicated: without a follower, 2 acknowledges no write, 1 those on one disk."""
    follower_timeout_s: Annotated[float, Meta(ge=0.1)] = 5.0
    """replicated: longest time without a confirmation of the follower."""
    verify_every_s: Annotated[float, Meta(ge=0)] = 24 * 3600.0
    """replicated: pause between two passes that verify every record, and repair damaged ones from
    the other replica; 0: no pass."""
    retention: Literal["keep", "covered"] = "covered"
    """keep: nothing is ever freed; covered: groups that a checkpoint covers, and groups given up or
    evaluated, are freed by keep_age_s and keep_bytes."""
    keep_age_s: Annotated[float, Meta(ge=0)] = 7 * 24 * 3600.0
    """Time that a group stays whole after it was trained, given up or evaluated, unless room is
    short."""
    keep_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of all records beyond which the oldest are freed at any age; 0: no limit."""
    max_turn_bytes: Annotated[int, Meta(ge=1 << 20)] = 64 << 20
    """Largest turn accepted, serialized."""
    reader_threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Threads that read from the store."""
