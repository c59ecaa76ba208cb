"""A scheduler and a pool, for trainers of several ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from forge.runtime.coordination import Coordinator
from tests.support.runtime.etcd import EtcdServer
from tests.support.scheduler.cluster import SchedulerCluster
from tests.support.trainer.process import TrainerClient, TrainerProcess
from tests.support.trainer.stack import GROUPS_PER_STEP, Stack


@pytest_asyncio.fixture
async def stack(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[Stack]:
    """The trainer is to be started, and its ranks ended, by the test."""
    services = SchedulerCluster(tmp_path, etcd=etcd, cluster=cluster, coordinator=coordinator)
    services.start_pool()
    services.start_scheduler(queue={"batch_groups": str(GROUPS_PER_STEP)})
    trainer = TrainerProcess(tmp_path, etcd=etcd, cluster=cluster, key_file=tmp_path / "key")
    client = TrainerClient(coordinator, services.channels)
    try:
        yield Stack(cluster=services, trainer=trainer, client=client)
    finally:
        await services.close()
