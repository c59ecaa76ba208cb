"""Fixtures of tests that need a whole system of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from forge.runtime.coordination import Coordinator
from tests.support.etcd import EtcdServer
from tests.support.scheduler_cluster import SchedulerCluster


@pytest_asyncio.fixture
async def forge(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[SchedulerCluster]:
    """A pool shard; schedulers are to be started."""
    running = SchedulerCluster(tmp_path, etcd=etcd, cluster=cluster, coordinator=coordinator)
    running.start_pool()
    yield running
    await running.close()
