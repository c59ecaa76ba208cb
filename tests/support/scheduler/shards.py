"""Schedulers with several pool shards."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count, islice
from typing import Any

from forge.core.placement.sharding import choose_shard
from tests.support.scheduler.cluster import START_S, SchedulerCluster, SchedulerProcess, ids_of


def names_on(shard: str, number: int, *, prefix: str, shards: Collection[str]) -> list[str]:
    """Task ids that are placed on a shard."""
    names = (f"{prefix}-{each}" for each in count())
    return list(islice((name for name in names if choose_shard(name, shards) == shard), number))


async def start(forge: SchedulerCluster, *shards: str, **settings: Any) -> SchedulerProcess:
    """Further shards, then a scheduler that leads."""
    for shard in shards:
        forge.start_pool(shard)
    await forge.coordinator.discover("pool").wait(count=1 + len(shards), timeout_s=START_S)
    scheduler = forge.start_scheduler(**settings)
    await forge.leader()
    return scheduler


async def train(forge: SchedulerCluster, step: int, *, groups: int = 2) -> list[str]:
    """Completes groups and commits a batch of them; its task ids."""
    await forge.complete_until(groups=groups)
    batch = await forge.take(groups=groups)
    await forge.commit(batch, step)
    return ids_of(batch)
