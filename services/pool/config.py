"""Settings of one pool instance."""

from __future__ import annotations

from dataclasses import dataclass

from forge.runtime.config import ServiceConfig, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(ServiceConfig):
    """One shard of the data pool: groups, trajectories and rewards, durable in LMDB."""

    data_dir: str = setting(".forge/pool", help="directory of the shard; one instance may use it")
    shard: str = setting(
        "", help="name of the shard; empty: the one kept in data_dir, drawn at first start"
    )
    map_bytes: int = setting(
        1 << 30, help="size of the memory map at first; it doubles when full", minimum=1 << 20
    )
    map_max_bytes: int = setting(
        1 << 40, help="size the shard may grow to; then writes are refused", minimum=1 << 20
    )
    disk_reserve_bytes: int = setting(
        64 << 20,
        help="free space below which turns are refused, kept for seals and batch states",
        minimum=0,
    )
    max_turn_bytes: int = setting(
        64 << 20, help="largest turn accepted, serialized", minimum=1 << 20
    )
    reader_threads: int = setting(4, help="threads that read from the store", minimum=1, maximum=64)
