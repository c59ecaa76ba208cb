"""Fixtures of tests that need a whole system of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator, Instance
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.etcd import EtcdServer
from tests.support.scheduler.cluster import SchedulerCluster


@pytest_asyncio.fixture
async def forge(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[SchedulerCluster]:
    """A pool shard; schedulers are to be started."""
    running = SchedulerCluster(tmp_path, etcd=etcd, cluster=cluster, coordinator=coordinator)
    running.start_pool()
    yield running
    await running.close()


@pytest.fixture(scope="module")
def stack(
    request: pytest.FixtureRequest,
    shared_etcd: EtcdServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GatewayStack]:
    """A pool, an engine and a gateway that all tests of a file share; the file's `FAMILY` names
    the chat template."""
    made = GatewayStack(
        folder=tmp_path_factory.mktemp("gateway"),
        etcd=shared_etcd,
        cluster=request.module.__name__.rpartition(".")[2].replace("_", "-"),
        family=getattr(request.module, "FAMILY", "chatml"),
    )
    made.start()
    yield made
    made.stop()


@pytest_asyncio.fixture
async def own_coordinator(stack: GatewayStack) -> AsyncIterator[Coordinator]:
    """Connected to the cluster of the file's stack."""
    connected = await Coordinator.connect(stack.etcd.endpoint, cluster=stack.cluster)
    yield connected
    await connected.close()


@pytest_asyncio.fixture
async def gateway(stack: GatewayStack, own_coordinator: Coordinator) -> Instance:
    """The gateway of the file's stack, once it is there."""
    return await stack.gateway(own_coordinator)
