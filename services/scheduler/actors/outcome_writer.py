"""The archivist: stores the fates that groups meet in the queue, tombstoned or evaluated.

Owns them until their shard has them. Each shard has a writer of its own, so that one that hangs
delays nothing but its own; nobody waits for an answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from forge.core.errors import ForgeError
from forge.runtime.actor import Actor
from forge.runtime.telemetry import log
from services.scheduler.pool_shards import Change, PoolShards
from services.scheduler.state.messages import Fate, StoreFates

RETRY_S = 2.0
LAST_WRITES_S = 1.0
"""What an orderly end waits for the writes under way: the next leader need not sample anew."""


class Archivist(Actor):
    """Writes fates to the pool, as soon as each shard answers."""

    mailbox_size: ClassVar[int] = 4096

    def __init__(self, shards: PoolShards) -> None:
        self._shards = shards
        self._waiting: dict[str, list[Fate]] = {}
        """By shard, what its writer has not begun with."""
        self._writers: dict[str, asyncio.Task[None]] = {}

    async def receive(self, message: Any) -> Any:
        match message:
            case StoreFates(fates=by_shard):
                for shard, fates in by_shard.items():
                    self._waiting.setdefault(shard, []).extend(fates)
                    if shard not in self._writers:
                        self._writers[shard] = asyncio.create_task(self._write(shard))
                return None
            case _:
                return await super().receive(message)

    async def stopped(self) -> None:
        writers = tuple(self._writers.values())
        if writers:
            await asyncio.wait(writers, timeout=LAST_WRITES_S)
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)

    async def _write(self, shard: str) -> None:
        try:
            while fates := self._waiting.pop(shard, None):
                if not await self._store(shard, fates):
                    self._waiting[shard] = fates + self._waiting.get(shard, [])
                    await asyncio.sleep(RETRY_S)
        finally:
            del self._writers[shard]

    async def _store(self, shard: str, fates: list[Fate]) -> bool:
        """False when they are to be tried again."""
        changes = [
            Change(task_id=fate.task_id, state=fate.state, reason=fate.reason) for fate in fates
        ]
        try:
            await self._shards.set_states({shard: changes})
        except ForgeError as error:
            if error.retryable:
                log.warning("fates_wait", pool_shard=shard, groups=len(fates), error=str(error))
                return False
            # Not durable, so the next leader will settle these groups anew.
            log.error("fates_refused", pool_shard=shard, groups=len(fates), error=str(error))
        return True
