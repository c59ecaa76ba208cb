"""Fixtures of tests that need a whole system of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator, Instance
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.etcd import EtcdServer


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
    with made.running():
        yield made


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
