"""A running replica as the copy for a repair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from forge.cli.connection import Connection
from forge.runtime.rpc.remote import Remote
from forge.v1.replica_pb2_grpc import PoolReplicaServiceStub
from services.pool.maintenance.repair import Fetch, OpenCopy
from services.pool.storage.record_copies import fetch_unit

LEADER = "leader"
"""In place of an address: the instance that leads the shard, found through etcd."""
_FIND_S = 5.0


def copy_at(at: Connection, address: str) -> OpenCopy:
    """A running replica, by its `address` (host:port) or as `LEADER`."""

    @contextmanager
    def open_copy(shard: str, lineage: str) -> Iterator[Fetch]:
        with asyncio.Runner() as runner:
            opened = AsyncExitStack()
            stub = runner.run(_connect(opened, at, address, shard))
            try:
                yield lambda unit: runner.run(
                    fetch_unit(stub, shard=shard, lineage=lineage, unit=unit)
                )
            finally:
                runner.run(opened.aclose())

    return open_copy


async def _connect(opened: AsyncExitStack, at: Connection, address: str, shard: str) -> Any:
    coordinator, channels = await opened.enter_async_context(at.open())
    if address != LEADER:
        return channels.stub(PoolReplicaServiceStub, address)
    remote = Remote(coordinator, channels, kind="pool", stub=PoolReplicaServiceStub)
    _, stub = await remote.pick(
        where=lambda instance: instance.metadata.get("shard") == shard, timeout_s=_FIND_S
    )
    return stub
