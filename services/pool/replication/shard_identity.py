"""The store that a shard's name belongs to: one durable record in etcd, and one leased key.

    pool/shards/<shard>     lineage of the shard, and the data directory that serves it alone (empty
                            while it is replicated: the record of its replicas decides); format and
                            key are `coordination.shard_record`'s
    pool/<shard>/server     leased by the process that serves an unreplicated shard

The record is written by compare-and-swap when a shard is first served. A store of another lineage,
or a copy in another directory, is refused with one line, unless its directory has the hand-over
mark of `restore` or `adopt`: then it gets the name once no live process has it. Without a record,
as in a new etcd, the first store to start gets the name. The store of a shard that was retired or
declared lost is always refused.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from forge.core.errors import ConfigError, Conflict, StaleFence, Unavailable
from forge.runtime.coordination import Coordinator, Fields, Registration
from forge.runtime.coordination.shard_record import ShardRecord, read_record, record_key
from forge.runtime.telemetry import log
from services.pool.config import PoolConfig
from services.pool.replication.replica_set import leadership_name
from services.pool.storage.environment.file_locks import has_hand_over_mark, remove_hand_over_mark
from services.pool.storage.journal import is_empty, replica_state
from services.pool.store import PoolStore


def record_of(store: PoolStore, config: PoolConfig, *, replicated: bool) -> ShardRecord:
    """The record of a shard whose name belongs to `store`."""
    return ShardRecord(
        lineage=store.lineage(),
        directory_id="" if replicated else store.directory_id,
        data_dir=str(store.directory.resolve()),
        host=socket.gethostname(),
        instance_id=config.instance_id,
    )


def may_serve(binding: ShardRecord | None, store: PoolStore, *, replicated: bool) -> bool:
    """Whether the name belongs to `store`, by the record or by its hand-over mark. The name of a
    shard that is gone belongs to any other store.

    A replicated shard may be served alone by any of its replicas; `serve_alone` checks before that
    it has every acknowledged write.
    """
    if binding is None:
        return True
    if binding.gone:
        return binding.lineage != store.lineage()
    if has_hand_over_mark(store.directory):
        return True
    if binding.lineage != store.lineage():
        return False
    if binding.directory_id:
        return binding.directory_id == store.directory_id
    return replicated or bool(store.read(replica_state).lineage)


async def check_follower(coordinator: Coordinator, store: PoolStore) -> None:
    """Raises `ConfigError` if `store` is of another shard of the same name; an empty store follows
    any."""
    binding, _ = await read_record(coordinator, store.shard)
    if binding is None or await asyncio.to_thread(store.read, is_empty):
        return
    if binding.gone:
        if binding.lineage == store.lineage():
            raise _refusal(store, binding)
        return
    if binding.lineage != store.lineage() and not has_hand_over_mark(store.directory):
        raise _refusal(store, binding)


async def bind_leader(coordinator: Coordinator, store: PoolStore, config: PoolConfig) -> None:
    """Records `store` as one of the replicas that own the name; for the shard's leader.

    Raises `ConfigError` if the name belongs to another store, `Unavailable` if a process serves
    that, or etcd does not answer.
    """
    binding, _ = await read_record(coordinator, store.shard)
    taken_over = binding is not None and binding.lineage != store.lineage()
    server = await coordinator.get(_server_key(store.shard)) if taken_over else None
    if server is not None:
        raise Unavailable(_taken(store)(json.loads(server.value)))
    await _bind(coordinator, store, config, replicated=True)


async def hold_shard(
    coordinator: Coordinator,
    store: PoolStore,
    config: PoolConfig,
    *,
    on_conflict: Callable[[Conflict], None],
) -> Registration:
    """Takes the shard's name for `store`, to be served without replicas, until closed.

    Raises `ConfigError` if the name belongs to another store, `Conflict` if a live process serves
    it, `Unavailable` if etcd does not answer. `on_conflict` is called if another process took it
    while the lease was lost.
    """
    binding, _ = await read_record(coordinator, store.shard)
    if not may_serve(binding, store, replicated=False):
        assert binding is not None
        raise _refusal(store, binding)
    leader = await coordinator.get(f"leader/{leadership_name(store.shard)}")
    if leader is not None:
        raise Unavailable(
            f"pool shard {store.shard} is led by {leader.value.decode()}: stop that before the "
            f"store in {store.directory} serves it alone"
        )
    held = await coordinator.hold(
        _server_key(store.shard),
        lambda _: asdict(record_of(store, config, replicated=False)),
        ttl_s=config.lease_ttl_s,
        taken=_taken(store),
        on_conflict=on_conflict,
    )
    try:
        await _bind(coordinator, store, config, replicated=False)
    except BaseException:
        await held.close()
        raise
    return held


async def _bind(
    coordinator: Coordinator, store: PoolStore, config: PoolConfig, *, replicated: bool
) -> None:
    wanted = record_of(store, config, replicated=replicated)
    while True:
        found, revision = await read_record(coordinator, store.shard)
        if not may_serve(found, store, replicated=replicated):
            assert found is not None
            raise _refusal(store, found)
        if found != wanted:
            try:
                await coordinator.compare_and_swap(
                    record_key(store.shard), wanted.encoded(), expected_revision=revision
                )
            except StaleFence:
                continue
        if found is not None and found.lineage != wanted.lineage:
            log.warning("shard_taken_over", pool_shard=store.shard, before=str(found))
        remove_hand_over_mark(store.directory)
        return


def _refusal(store: PoolStore, binding: ShardRecord) -> ConfigError:
    directory: Path = store.directory.resolve()
    if binding.gone:
        return ConfigError(
            f"pool shard {store.shard} with the store in {directory} {binding.gone_text}: its "
            "groups are on other shards or tombstoned; start a shard with an empty data_dir"
        )
    return ConfigError(
        f"pool shard {store.shard} belongs to {binding}, not to the one in {directory}: give "
        "another shard name, or, if that store is gone for good, run "
        f"`forge pool adopt {directory}` and start again"
    )


def _taken(store: PoolStore) -> Callable[[Fields], str]:
    def message(other: Fields) -> str:
        return (
            f"pool shard {store.shard} is served by instance {other['instance_id']} on host "
            f"{other['host']} from {other['data_dir']}: stop that before the store in "
            f"{store.directory.resolve()} serves it"
        )

    return message


def _server_key(shard: str) -> str:
    return f"pool/{shard}/server"
