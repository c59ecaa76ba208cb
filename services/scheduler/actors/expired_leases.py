"""Looks up rollouts whose lease expired.

The trajectory of an expired lease may have been sealed just before. Only the pool knows, so this
actor reads the pool before the queue starts another attempt. It reads each pool shard separately,
so a shard that hangs delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from forge.core.errors import ForgeError
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.telemetry import log
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.state.messages.rollouts import AttemptReport, CheckExpired, SettleRollouts


class ExpiredLeaseActor(Actor):
    """Reads expired attempts from the pool and reports them to the queue."""

    mailbox_size: ClassVar[int] = 256

    def __init__(self, queue: ActorRef, shards: PoolShards) -> None:
        self._queue = queue
        self._shards = shards
        self._checks: dict[str, asyncio.Task[None]] = {}
        """By shard."""

    async def receive(self, message: Any) -> Any:
        """Handles CheckExpired."""
        match message:
            case CheckExpired(trajectory_ids=by_shard):
                # The queue repeats the message until the attempts are settled.
                for shard in by_shard.keys() - self._checks.keys():
                    check = self._check(shard, by_shard[shard])
                    self._checks[shard] = asyncio.create_task(check)
                return None
            case _:
                return await super().receive(message)

    async def stopped(self) -> None:
        """Cancels the checks."""
        await cancel_and_wait(*self._checks.values())

    async def _check(self, shard: str, trajectory_ids: Sequence[str]) -> None:
        try:
            summaries = await self._shards.summaries({shard: trajectory_ids})
            reports = [
                AttemptReport(
                    trajectory_id=trajectory_id,
                    silent=True,
                    summary=summaries.get(trajectory_id),
                )
                for trajectory_id in trajectory_ids
            ]
            self._queue.tell(SettleRollouts(reports=reports))
        except ForgeError as error:
            log.warning("expired_leases_not_checked", pool_shard=shard, error=str(error))
        finally:
            del self._checks[shard]
