"""One host whose clock is hours off: real processes, one of them with a shifted clock."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator
from tests.support.pool.process import PoolProcess
from tests.support.runtime.etcd import EtcdServer
from tests.support.scheduler.cluster import START_S, SchedulerCluster, ids_of, make_task

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests" / "support" / "runtime" / "skewed_clock"
HOURS_S = 3600.0


@pytest_asyncio.fixture
async def forge(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[SchedulerCluster]:
    """Nothing runs yet."""
    running = SchedulerCluster(tmp_path, etcd=etcd, cluster=cluster, coordinator=coordinator)
    yield running
    await running.close()


@contextmanager
def shifted(offset_s: float, **environment: str) -> Iterator[None]:
    """Processes started inside have a wall clock that is `offset_s` ahead."""
    path = os.pathsep.join([str(SHIM), str(ROOT)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("CLOCK_OFFSET_S", str(offset_s))
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


async def start_with_pool_off(forge: SchedulerCluster, **environment: str) -> PoolProcess:
    """Two schedulers with the true time, then a pool that is two hours ahead of it."""
    for _ in range(2):
        forge.start_scheduler()
    await forge.coordinator.discover("scheduler").wait(count=2, timeout_s=START_S)
    with shifted(2 * HOURS_S, **environment):
        return forge.start_pool()


async def command(etcd: EtcdServer, cluster: str, folder: Path, name: str) -> str:
    """What `forge <name>` prints of the cluster."""
    words = (name, "--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(folder / "key"))
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "forge.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "COLUMNS": "400"},
    )
    return ended.stdout


async def test_clock_two_hours_off_stops_nothing_and_is_named(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """A group is submitted, sampled, trained and committed with a pool that is two hours ahead; the
    pool's own metadata, `forge status` and `forge doctor` name it and its offset."""
    await start_with_pool_off(forge)
    await forge.submit([make_task("a")])
    await forge.complete(1)
    batch = await forge.take()
    assert ids_of(batch) == ["a"]
    await forge.commit(batch, 1)
    assert (await forge.status()).trained == 1

    (pool,) = await forge.coordinator.discover("pool").wait(
        timeout_s=START_S, where=lambda instance: "clock_offset_s" in instance.metadata
    )
    offset_s = float(pool.metadata["clock_offset_s"])
    assert abs(offset_s - 2 * HOURS_S) < 600
    for name in ("status", "doctor"):
        said = await command(etcd, cluster, tmp_path, name)
        (line,) = [line for line in said.splitlines() if "ahead of the others" in line]
        assert pool.instance_id in line
        assert pool.address in line


async def test_status_shows_why_no_scheduler_can_lead(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """If no clock difference is tolerated, `forge status` has the reason of the failed terms."""
    await start_with_pool_off(forge, FORGE_CLOCK_TOLERANCE_S="0")
    await forge.coordinator.discover("scheduler").wait(
        timeout_s=START_S, where=lambda instance: "term_error" in instance.metadata
    )
    said = await command(etcd, cluster, tmp_path, "status")
    reason = said.partition("scheduler\n")[2].splitlines()[0]
    assert "no scheduler leads" in reason
    assert "expired" in reason
    assert "clock" in reason
