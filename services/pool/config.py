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
    durability: str = setting(
        "local",
        help="local: acknowledged once on this disk; replicated: once on the other instance's of "
        "the same shard, too",
        choices=("local", "replicated"),
    )
    min_copies: int = setting(
        2,
        help="replicated: 2 acknowledges nothing while there is no follower, 1 goes on alone",
        minimum=1,
        maximum=2,
    )
    follower_timeout_s: float = setting(
        5.0, help="replicated: how long a follower may confirm nothing", minimum=0.1
    )
    verify_every_s: float = setting(
        24 * 3600.0,
        help="replicated: pause between two passes that verify every record, and repair what is "
        "damaged from the other replica; 0: no pass",
        minimum=0,
    )
    retention: str = setting(
        "covered",
        help="keep: nothing is ever freed; covered: what a checkpoint covers, and what was given "
        "up or evaluated, is freed by keep_age_s and keep_bytes",
        choices=("keep", "covered"),
    )
    keep_age_s: float = setting(
        7 * 24 * 3600.0,
        help="how long a group stays whole after it was trained, given up or evaluated, unless "
        "room is short",
        minimum=0,
    )
    keep_bytes: int = setting(
        0,
        help="what records may take up before the oldest are freed whatever their age; 0: no end",
        minimum=0,
    )
    max_turn_bytes: int = setting(
        64 << 20, help="largest turn accepted, serialized", minimum=1 << 20
    )
    reader_threads: int = setting(4, help="threads that read from the store", minimum=1, maximum=64)
