"""The inspector: finds out what became of rollouts whose runner is silent.

A claim that ended says nothing about the trajectory: it may have been sealed in the last moment.
Only the pool knows, so it is asked before another attempt is made. Each shard is asked on its own,
so that one that hangs delays the claims of no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from forge.core.errors import ForgeError
from forge.runtime.actor import Actor
from forge.runtime.actor_system import ActorRef
from forge.runtime.telemetry import log
from services.scheduler.pool_shards import PoolShards
from services.scheduler.state.messages import Inspect, Report, SettleRollouts


class Inspector(Actor):
    """Looks expired attempts up in the pool and reports on them to the queue."""

    mailbox_size: ClassVar[int] = 256

    def __init__(self, queue: ActorRef, shards: PoolShards) -> None:
        self._queue = queue
        self._shards = shards
        self._inspections: dict[str, asyncio.Task[None]] = {}
        """By shard."""

    async def receive(self, message: Any) -> Any:
        match message:
            case Inspect(trajectory_ids=by_shard):
                # The queue names them again as long as their fate is not settled.
                for shard in by_shard.keys() - self._inspections.keys():
                    inspection = self._inspect(shard, by_shard[shard])
                    self._inspections[shard] = asyncio.create_task(inspection)
                return None
            case _:
                return await super().receive(message)

    async def stopped(self) -> None:
        inspections = tuple(self._inspections.values())
        for inspection in inspections:
            inspection.cancel()
        await asyncio.gather(*inspections, return_exceptions=True)

    async def _inspect(self, shard: str, trajectory_ids: Sequence[str]) -> None:
        try:
            summaries = await self._shards.summaries({shard: trajectory_ids})
            reports = [
                Report(
                    trajectory_id=trajectory_id,
                    silent=True,
                    summary=summaries.get(trajectory_id),
                )
                for trajectory_id in trajectory_ids
            ]
            self._queue.tell(SettleRollouts(reports=reports))
        except ForgeError as error:
            log.warning("inspection_put_off", pool_shard=shard, error=str(error))
        finally:
            del self._inspections[shard]
