"""Leaders killed one after the other under a full queue, and how long their clients had to wait.

Real processes on loopback: etcd, a pool shard, and two schedulers at a time with the default
settings of leases, TTL and hold. Owns the measurement, not how its numbers are shown.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from forge.runtime.coordination import Coordinator
from forge.runtime.telemetry import configure_logging
from services.scheduler.config import SchedulerConfig
from tests.support.etcd import EtcdServer
from tests.support.scheduler_cluster import START_S, SchedulerCluster, SchedulerProcess, make_task

CLUSTER = "takeover"
TTL_S = SchedulerConfig().lease_ttl_s
KILLS = 5
MIN_GROUPS = 128
"""What so many kills use up."""
GROUPS_PER_CALL = 256
BATCH_GROUPS = 8
CLAIMS = 8
"""Rollouts that are with a runner when the leader is killed."""


async def measure_takeover(folder: Path, groups: int) -> dict[str, float]:
    """Seconds from SIGKILL to each first answer, and of the rebuild, of so many groups."""
    configure_logging("benchmark", CLUSTER, level="warning", file="")
    async with AsyncExitStack() as undo:
        etcd = EtcdServer(folder / "etcd")
        etcd.start()
        undo.callback(etcd.stop)
        coordinator = await Coordinator.connect(etcd.endpoint, cluster=CLUSTER)
        undo.push_async_callback(coordinator.close)
        cluster = SchedulerCluster(folder, etcd=etcd, cluster=CLUSTER, coordinator=coordinator)
        undo.push_async_callback(cluster.close)
        cluster.start_pool()
        leader = _start(cluster)
        await cluster.leader()
        for start in range(0, groups, GROUPS_PER_CALL):
            numbers = range(start, min(start + GROUPS_PER_CALL, groups))
            await cluster.submit(make_task(f"task-{number}") for number in numbers)
        waits_s: defaultdict[str, list[float]] = defaultdict(list)
        for step in range(1, KILLS + 1):
            standby = _start(cluster)
            await coordinator.discover("scheduler").wait(count=2, timeout_s=START_S)
            for name, wait_s in (await _kill(cluster, leader, step)).items():
                waits_s[name].append(wait_s)
            waits_s["rebuild"].append(standby.logged("term_began")[0]["rebuilt_s"])
            leader = standby
        return _summary(waits_s, groups)


def _start(cluster: SchedulerCluster) -> SchedulerProcess:
    config = SchedulerConfig()
    return cluster.start_scheduler(
        concurrency="64",
        window="64",
        batch_groups=str(BATCH_GROUPS),
        lease_ttl_s=str(TTL_S),
        takeover_hold_s=str(config.takeover_hold_s),
        pool_timeout_s=str(config.pool_timeout_s),
    )


async def _kill(cluster: SchedulerCluster, leader: SchedulerProcess, step: int) -> dict[str, float]:
    """With a batch and claims out, SIGKILL; seconds until each kind of call was answered.

    The callers retry as all clients of the scheduler do, with a back-off of up to 2 s.
    """
    await cluster.complete(BATCH_GROUPS)
    batch = await cluster.take()
    running = await cluster.lease(CLAIMS)
    leader.kill()
    killed_s = time.monotonic()

    async def after(call: Awaitable[Any]) -> tuple[float, Any]:
        answer = await call
        return time.monotonic() - killed_s, answer

    (status_s, _), (renew_s, lost), (commit_s, _), (lease_s, fresh) = await asyncio.gather(
        after(cluster.status()),
        after(cluster.renew(running)),
        after(cluster.commit(batch, step)),
        after(cluster.lease(1, wait_s=START_S)),
    )
    assert not lost, f"claims were lost: {lost}"
    for lease in (*running, *fresh):
        await cluster.seal(lease)
    await cluster.finish((*running, *fresh))
    return {"status": status_s, "renew": renew_s, "commit": commit_s, "lease": lease_s}


def _summary(waits_s: dict[str, list[float]], groups: int) -> dict[str, float]:
    numbers: dict[str, float] = {"groups": groups, "ttl_s": TTL_S}
    for name, waits in waits_s.items():
        numbers[f"{name}_mean_s"] = sum(waits) / len(waits)
        numbers[f"{name}_worst_s"] = max(waits)
    return numbers
