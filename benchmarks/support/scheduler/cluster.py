"""An etcd and an empty scheduler cluster for benchmarks of the scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from forge.runtime.coordination import Coordinator
from tests.support.runtime.etcd import EtcdServer
from tests.support.scheduler.cluster import SchedulerCluster


@asynccontextmanager
async def scheduler_cluster(
    folder: Path, name: str
) -> AsyncIterator[tuple[EtcdServer, SchedulerCluster]]:
    """Starts etcd under `folder`; stops it and all that the cluster has started at the end."""
    async with AsyncExitStack() as undo:
        etcd = EtcdServer(folder / "etcd")
        etcd.start()
        undo.callback(etcd.stop)
        coordinator = await Coordinator.connect(etcd.endpoint, cluster=name)
        undo.push_async_callback(coordinator.close)
        cluster = SchedulerCluster(folder, etcd=etcd, cluster=name, coordinator=coordinator)
        undo.push_async_callback(cluster.close)
        yield etcd, cluster
