"""Follows the erasures of the pool shards, so that erased groups leave the queue of the term.

Owns the mark of each shard. A shard that no longer knows the mark sends all erased groups: the
queue ignores those that it has settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import KW_ONLY, dataclass

from forge.core.errors import ForgeError, Unavailable
from forge.core.queue.groups import ERASED
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.rpc.chunks import batched
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.state.erased_groups import NoteErased

FOLLOW_S = 2.0
"""Between two scans of a shard."""
ASK_S = 30.0
PART_GROUPS = 1000
"""Groups in one message to the queue."""


@dataclass(eq=False, slots=True)
class ErasureFollower:
    """The erasures of one term."""

    queue: ActorRef
    shards: PoolShards
    _: KW_ONLY
    registered: Callable[[], frozenset[str]]
    """The shards that the term has read."""
    marks: MutableMapping[str, str]
    """By shard, the mark of the scan that read it; updated here."""

    async def follow(self) -> None:
        """Reports erased groups to the queue, until cancelled."""
        while True:
            for shard in sorted(self.registered() & self.shards.live()):
                try:
                    await self.report(shard)
                except ForgeError as error:
                    log.warning("erasures_not_followed", pool_shard=shard, error=str(error))
            await asyncio.sleep(FOLLOW_S)

    async def report(self, shard: str) -> None:
        """Reports the groups erased since the mark. Raises ForgeError: then the mark stays."""
        mark, erased = "", list[str]()
        responses = self.shards.scan(shard, since=self.marks.get(shard, ""), erased_only=True)
        async for response in responses:
            if response.HasField("begin"):
                mark = response.begin.mark
            elif _is_erased(response):
                erased.append(response.group.task.task_id)
        if not mark:
            raise Unavailable(f"pool shard {shard} returns no marks")
        for part in batched(erased, PART_GROUPS):
            await self._note(shard, part)
        self.marks[shard] = mark

    async def _note(self, shard: str, task_ids: Sequence[str]) -> None:
        dropped = await self.queue.ask(NoteErased(task_ids=task_ids), timeout_s=ASK_S)
        if dropped:
            log.info("erased_groups_dropped", pool_shard=shard, groups=dropped)


def _is_erased(response: pool_pb2.ScanGroupsResponse) -> bool:
    group = response.group
    return group.state == common_pb2.GROUP_STATE_TOMBSTONED and group.reason == ERASED
