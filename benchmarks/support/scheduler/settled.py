"""Cost of settled groups for a scheduler: a cold rebuild, standing by, and submissions.

Real processes on loopback: etcd, a pool shard whose groups of one sealed rollout were all trained
on, and two schedulers. The first one begins its term without having stood by; the second stands by.
Then tasks are submitted whose ids the leader has to look up. Owns the measurement, not how its
numbers are shown.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.support.cpu import cpu_s, rss_bytes
from benchmarks.support.scheduler.cluster import scheduler_cluster
from benchmarks.support.scheduler.takeover import fill
from forge.runtime.telemetry import configure_logging
from tests.support.scheduler.cluster import SchedulerCluster, make_task

CLUSTER = "settled"
CALLS = 20
TASKS_PER_CALL = 64
_MB = 1e6


async def measure_settled(folder: Path, groups: int) -> dict[str, float]:
    """CPU seconds and memory with so many groups; a shard that lies in `folder` already is used as
    it is."""
    configure_logging("benchmark", CLUSTER, level="warning", file="")
    data_dir = folder / "pool-s0" / "data"
    if not data_dir.exists():
        await asyncio.to_thread(fill, data_dir, groups)
    async with AsyncExitStack() as undo:
        _etcd, cluster = await undo.enter_async_context(scheduler_cluster(folder, CLUSTER))
        pool = cluster.start_pool()
        leader = cluster.start_scheduler()
        (began,) = await leader.until_logged("term_began")
        (registered,) = leader.logged("pool_shard_registered")
        pid = leader.process.pid
        numbers = {
            "cold_cpu_s": cpu_s(pid),
            "cold_peak_mb": _peak_bytes(pid) / _MB,
            "cold_rebuilt_s": began["rebuilt_s"],
            "cold_pool_cpu_s": cpu_s(pool.pid),
            "groups_read": registered["groups_read"],
        }
        assert began["accepted"] == groups
        standby = cluster.start_scheduler()
        await standby.until_logged("pool_shard_scanned")
        numbers["standby_mb"] = rss_bytes(standby.process.pid) / _MB
        numbers["submit_ms"] = 1000 * await _submit(cluster)
        return numbers


async def _submit(cluster: SchedulerCluster) -> float:
    """Median seconds of a call with new tasks."""
    times_s = []
    for call in range(CALLS):
        tasks = [make_task(f"new-{call}-{number}") for number in range(TASKS_PER_CALL)]
        started_s = time.monotonic()
        await cluster.submit(tasks)
        times_s.append(time.monotonic() - started_s)
    return statistics.median(times_s)


def _peak_bytes(pid: int) -> int:
    """The most resident memory that a process ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
