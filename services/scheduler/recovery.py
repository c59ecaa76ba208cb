"""How a new leader takes office: the pool's records become the queue again.

    1. read the term record from etcd, add one, write it back (`services.scheduler.record`)
    2. wait until every pool shard that ever held a group is registered
    3. fence each shard, so that an earlier leader's writes are refused from then on
    4. scan each shard: what was changed on it since this instance, standing by, scanned it last
       (`services.scheduler.standby`), or all of it; and add every group in queue order

A shard is entered in the record before the first group is put on it, so none can be forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from forge.runtime.telemetry import log
from services.scheduler.shards import PoolShards, gathered
from services.scheduler.standby import ShardCopies
from services.scheduler.stored import StoredGroup

_REMIND_S = 10.0


async def wait_for_shards(
    shards: PoolShards, known: frozenset[str], *, lost: frozenset[str]
) -> None:
    """Until every known shard but the lost is registered, and at least one is."""
    while not shards.live() or known - lost - shards.live():
        missing = sorted(known - lost - shards.live())
        log.warning("waiting_for_pool_shards", missing=missing or "any")
        try:
            async with asyncio.timeout(_REMIND_S):
                await shards.changed()
        except TimeoutError:
            continue


async def enlist(
    shards: PoolShards, names: Iterable[str], copies: ShardCopies
) -> list[StoredGroup]:
    """Fence shards, and bring their copies up to date; their groups, taken from `copies`, in queue
    order."""

    async def enlist_one(shard: str) -> None:
        # The fence first: after the scan, nobody else may write.
        await shards.raise_fence(shard)
        told = await copies.refresh(shard)
        log.info("pool_shard_enlisted", pool_shard=shard, groups=copies.held(shard), told=told)

    await gathered(map(enlist_one, names))
    return copies.take(names)
