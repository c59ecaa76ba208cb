"""What an instance that stands by keeps of each pool shard, so that it need not scan when elected.

A copy is what a scan told and all that was changed up to its mark. It is brought up to date by
asking what was changed since; where the shard does not know the mark any more, because another
process serves it or too much was changed, it answers with everything, and that takes the copy's
place. Nothing here is true by itself: the one moment that counts is a refresh after the fence.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from forge.core.errors import FailedPrecondition, ForgeError
from forge.runtime.telemetry import log
from services.scheduler.shards import ShardScans
from services.scheduler.stored import StoredGroup, stored_group

FOLLOW_S = 2.0
"""From one look at the shards to the next."""
RETRY_S = 10.0
"""After one that failed: a shard that cannot be scanned is not to be scanned all the time."""

_PLACE = attrgetter("place")


@dataclass(slots=True, kw_only=True)
class _Copy:
    mark: str = ""
    groups: dict[str, StoredGroup] = field(default_factory=dict)
    """By task id."""


class ShardCopies:
    """The groups of any number of shards, each as of its last refresh."""

    def __init__(self, shards: ShardScans) -> None:
        self._shards = shards
        self._copies: dict[str, _Copy] = {}

    async def follow(self) -> None:
        """Keeps copies of the shards there are, until cancelled."""
        while True:
            pause_s = FOLLOW_S
            live = self._shards.live()
            for gone in self._copies.keys() - live:
                del self._copies[gone]
            for shard in sorted(live):
                try:
                    await self._follow(shard)
                except ForgeError as error:
                    log.warning("pool_shard_not_followed", pool_shard=shard, error=str(error))
                    pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    async def _follow(self, shard: str) -> None:
        started_s = time.monotonic()
        before = self._copies.get(shard)
        # As in a term: what is kept for long need not be walked each time.
        gc.disable()
        try:
            await self.refresh(shard)
            if self._copies[shard] is before:
                return
            gc.freeze()
        finally:
            gc.enable()
        log.info(
            "pool_shard_scanned",
            pool_shard=shard,
            groups=self.held(shard),
            scan_s=time.monotonic() - started_s,
        )

    async def refresh(self, shard: str) -> int:
        """Brings the copy of a shard to what the shard holds now; how many groups were told.

        Whatever it raises, the copy is as good as before, or there is none.
        """
        copy = self._copies.get(shard) or _Copy()
        mark, told = "", dict[str, StoredGroup]()
        async for response in self._shards.scan(shard, since=copy.mark):
            if response.HasField("begin"):
                mark = response.begin.mark
                if not response.begin.changes_only:
                    # Not both at a time: each may be a million groups.
                    self._copies.pop(shard, None)
                    copy = _Copy()
            else:
                stored = stored_group(response)
                told[stored.group.spec.task_id] = stored
        if not mark:
            raise FailedPrecondition(f"pool shard {shard} gives no marks: upgrade it first")
        copy.groups.update(told)
        copy.mark = mark
        self._copies[shard] = copy
        return len(told)

    def held(self, shard: str) -> int:
        """Groups in the copy of a shard."""
        return len(self._copies[shard].groups)

    def take(self, names: Iterable[str]) -> list[StoredGroup]:
        """The groups of some shards, in queue order; the copies are given up, for who rebuilds a
        term from the groups changes them."""
        found: list[StoredGroup] = []
        for shard in sorted(names):
            found += self._copies.pop(shard).groups.values()
        found.sort(key=_PLACE)
        return found
