"""Leaders killed one after the other under a full queue, and how long their clients had to wait.

Real processes on loopback: etcd, a pool shard, and two schedulers at a time with the default
settings of leases, TTL and hold. A leader is killed once the other one has scanned the shard; at
the end, one that never stood by takes over. Owns the measurement, not how its numbers are shown.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.support.scheduler.cluster import scheduler_cluster
from forge.core.tasks.task_digest import task_digest
from forge.runtime.telemetry import configure_logging
from forge.v1 import common_pb2, pool_pb2
from services.pool import validation
from services.pool.store import PoolStore
from services.scheduler.config import SchedulerConfig
from tests.support.pool.records import make_reward
from tests.support.pool.store import change
from tests.support.scheduler.cluster import START_S, SchedulerCluster, SchedulerProcess, make_task

CLUSTER = "takeover"
TTL_S = SchedulerConfig().lease_ttl_s
KILLS = 5
MIN_GROUPS = 128
"""Groups that `KILLS` kills use up."""
GROUPS_PER_CALL = 256
GROUPS_PER_COMMIT = 4096
GROUPS_PER_STEP = 512
"""Groups per step of those that were trained before."""
BATCH_GROUPS = 8
CLAIMS = 8
"""Rollouts that are with a runner when the leader is killed."""


async def measure_takeover(folder: Path, groups: int, *, trained: bool) -> dict[str, float]:
    """Seconds from SIGKILL to each first answer, and of the rebuild, of so many groups; `trained`:
    of these, all but what the kills use up were trained on before."""
    configure_logging("benchmark", CLUSTER, level="warning", file="")
    async with AsyncExitStack() as undo:
        _etcd, cluster = await undo.enter_async_context(scheduler_cluster(folder, CLUSTER))
        over = groups - MIN_GROUPS if trained else 0
        await asyncio.to_thread(fill, folder / "pool-s0" / "data", over)
        cluster.start_pool()
        leader = _start(cluster)
        await leader.until_logged("term_began")
        for start in range(over, groups, GROUPS_PER_CALL):
            numbers = range(start, min(start + GROUPS_PER_CALL, groups))
            await cluster.submit(make_task(f"task-{number}") for number in numbers)
        waits_s: defaultdict[str, list[float]] = defaultdict(list)
        for step in range(1, KILLS + 1):
            standby = _start(cluster)
            (scanned,) = await standby.until_logged("pool_shard_scanned")
            waits_s["scan"].append(scanned["scan_s"])
            for name, wait_s in (await _kill(cluster, leader, _step(over) + step)).items():
                waits_s[name].append(wait_s)
            (began,) = await standby.until_logged("term_began")
            waits_s["rebuild"].append(began["rebuilt_s"])
            leader = standby
        leader.kill()
        (cold,) = await _start(cluster).until_logged("term_began")
        waits_s["cold"].append(cold["rebuilt_s"])
        return _summary(waits_s, groups)


def fill(data_dir: Path, groups: int) -> None:
    """A shard with so many groups of one sealed rollout that were trained on."""
    data_dir.mkdir(parents=True)
    with closing(PoolStore(data_dir, shard="s0")) as store:
        for start in range(0, groups, GROUPS_PER_COMMIT):
            numbers = range(start, min(start + GROUPS_PER_COMMIT, groups))
            tasks = [make_task(f"task-{number}") for number in numbers]
            records = [
                common_pb2.GroupRecord(
                    task=task, queue_index=number, pool_shard="s0", task_digest=task_digest(task)
                )
                for number, task in zip(numbers, tasks, strict=True)
            ]
            seals = [
                pool_pb2.SealTrajectoryRequest(
                    trajectory_id=f"{task.task_id}:0:0",
                    domain=task.domain,
                    rewards=[make_reward()],
                    state=common_pb2.TRAJECTORY_STATE_SEALED,
                )
                for task in tasks
            ]
            changes = [
                change(
                    task.task_id,
                    common_pb2.GROUP_STATE_TRAINED,
                    batch_id=f"earlier-{_step(number)}",
                    step=_step(number),
                )
                for number, task in zip(numbers, tasks, strict=True)
            ]
            put = pool_pb2.PutGroupsRequest(groups=records)
            states = pool_pb2.SetGroupStatesRequest(changes=changes)
            now_unix_s = time.time()
            answers = store.commit(
                [
                    validation.put_groups(put, shard="s0"),
                    *(validation.seal_trajectory(one, now_unix_s=now_unix_s) for one in seals),
                    validation.set_group_states(states, now_unix_s=now_unix_s),
                ]
            )
            assert not [one for one in answers if isinstance(one, Exception)]


def _step(number: int) -> int:
    """The step that trained a group before the measurement, as its number says."""
    return 1 + number // GROUPS_PER_STEP


def _start(cluster: SchedulerCluster) -> SchedulerProcess:
    config = SchedulerConfig()
    return cluster.start_scheduler(
        queue={"concurrency": "64", "window": "64", "batch_groups": str(BATCH_GROUPS)},
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
