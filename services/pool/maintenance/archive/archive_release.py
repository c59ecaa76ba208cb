"""Has a running shard free the groups that an archive has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import islice

from forge.cli.connection import Connection
from forge.runtime.rpc.remote import Remote
from forge.v1 import pool_pb2
from forge.v1.pool_pb2_grpc import PoolServiceStub

GROUPS_A_CALL = 64
_CALL_S = 600.0
_RETRY_S = 60.0


def free_archived(at: Connection, shard: str, digests: Mapping[str, bytes]) -> list[str]:
    """Returns the tasks whose groups are freed. Raises as FreeArchivedGroups."""
    return asyncio.run(_free(at, shard, digests))


async def _free(at: Connection, shard: str, digests: Mapping[str, bytes]) -> list[str]:
    freed: list[str] = []
    left = iter(digests.items())
    async with at.open() as (coordinator, channels):
        pool = Remote(coordinator, channels, kind="pool", stub=PoolServiceStub)
        while groups := list(islice(left, GROUPS_A_CALL)):
            request = pool_pb2.FreeArchivedGroupsRequest(
                groups=[
                    pool_pb2.GroupDigest(task_id=task_id, digest=digest)
                    for task_id, digest in groups
                ]
            )
            response = await pool.call(
                "FreeArchivedGroups",
                request,
                timeout_s=_CALL_S,
                retry_for_s=_RETRY_S,
                where=lambda instance: instance.metadata.get("shard") == shard,
            )
            freed += response.freed
    return freed
