"""The inspector: finds out what became of rollouts whose runner is silent.

A claim that ended says nothing about the trajectory: it may have been sealed in the last moment.
Only the pool knows, so it is asked before another attempt is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from forge.core.errors import Unavailable
from forge.runtime.actor import Actor, ActorRef
from forge.runtime.telemetry import log
from services.scheduler.messages import Inspect, Report, SettleRollouts
from services.scheduler.shards import PoolShards


class Inspector(Actor):
    """Looks expired attempts up in the pool and reports on them to the queue."""

    mailbox_size: ClassVar[int] = 256

    def __init__(self, queue: ActorRef, shards: PoolShards) -> None:
        self._queue = queue
        self._shards = shards

    async def receive(self, message: Any) -> Any:
        match message:
            case Inspect(trajectory_ids=by_shard):
                async with asyncio.TaskGroup() as inspections:
                    for shard, trajectory_ids in by_shard.items():
                        inspections.create_task(self._inspect(shard, trajectory_ids))
                return None
            case _:
                return await super().receive(message)

    async def _inspect(self, shard: str, trajectory_ids: Sequence[str]) -> None:
        try:
            summaries = await self._shards.summaries({shard: trajectory_ids})
        except Unavailable as error:
            # The queue names them again as long as their fate is not settled.
            log.warning("inspection_put_off", pool_shard=shard, error=str(error))
            return
        reports = [
            Report(
                trajectory_id=trajectory_id,
                error="its runner went silent, or it took too long",
                summary=summaries.get(trajectory_id),
            )
            for trajectory_id in trajectory_ids
        ]
        self._queue.tell(SettleRollouts(reports=reports))
