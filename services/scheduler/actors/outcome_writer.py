"""Stores groups that end in the queue: tombstoned or evaluated.

Owns their final states until the pool shard has stored them. Each shard has a separate writer, so
a shard that hangs delays no other. No caller waits for an answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from forge.core.errors import ForgeError
from forge.runtime.actors.actor import Actor
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.telemetry import log
from services.scheduler.shards.pool_shards import GroupStateChange, PoolShards
from services.scheduler.state.messages.groups import StoreFinalStates

RETRY_S = 2.0
LAST_WRITES_S = 1.0
"""Wait of an orderly end for pending writes, so that the next leader repeats no sampling."""


class OutcomeWriter(Actor):
    """Writes final states to the pool; retries each shard until it answers."""

    mailbox_size: ClassVar[int] = 4096

    def __init__(self, shards: PoolShards) -> None:
        self._shards = shards
        self._waiting: dict[str, list[GroupStateChange]] = {}
        """By shard: states that its writer has not read yet."""
        self._writers: dict[str, asyncio.Task[None]] = {}

    async def receive(self, message: Any) -> Any:
        """Handles StoreFinalStates."""
        match message:
            case StoreFinalStates(changes=by_shard):
                for shard, changes in by_shard.items():
                    self._waiting.setdefault(shard, []).extend(changes)
                    if shard not in self._writers:
                        self._writers[shard] = asyncio.create_task(self._write(shard))
                return None
            case _:
                return await super().receive(message)

    async def stopped(self) -> None:
        """Waits up to `LAST_WRITES_S` for the writes under way."""
        writers = tuple(self._writers.values())
        if writers:
            await asyncio.wait(writers, timeout=LAST_WRITES_S)
        await cancel_and_wait(*writers)

    async def _write(self, shard: str) -> None:
        try:
            while changes := self._waiting.pop(shard, None):
                if not await self._store(shard, changes):
                    self._waiting[shard] = changes + self._waiting.get(shard, [])
                    await asyncio.sleep(RETRY_S)
        finally:
            del self._writers[shard]

    async def _store(self, shard: str, changes: list[GroupStateChange]) -> bool:
        """False if the write must be retried."""
        try:
            await self._shards.set_states({shard: changes})
        except ForgeError as error:
            facts = {"pool_shard": shard, "groups": len(changes), "error": str(error)}
            if error.retryable:
                log.warning("final_states_delayed", **facts)
                return False
            # Not durable: the next leader settles these groups again.
            log.error("final_states_refused", **facts)
        return True
