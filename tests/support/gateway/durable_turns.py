"""Turns that the pool has on disk: a gateway answers before, and another gateway reads these."""

from __future__ import annotations

from forge.runtime.coordination import Coordinator
from forge.v1 import pool_pb2
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.waiting import until


async def durable_turns(stack: GatewayStack, coordinator: Coordinator, trajectory_id: str) -> int:
    """Turns of a trajectory that are on disk."""
    client = await stack.pool_client(coordinator)
    request = pool_pb2.GetSummariesRequest(trajectory_ids=[trajectory_id])
    summaries = (await client.stub.GetSummaries(request)).summaries
    await client.close()
    return summaries[0].turns if summaries else 0


async def until_durable(
    stack: GatewayStack, coordinator: Coordinator, trajectory_id: str, turns: int
) -> None:
    """Wait until the pool has so many turns on disk: another gateway reads those."""

    async def all_durable() -> bool:
        return await durable_turns(stack, coordinator, trajectory_id) >= turns

    await until(all_durable)
