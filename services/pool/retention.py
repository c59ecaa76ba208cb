"""Retention: which groups are freed, when and how fast.

Owns the policy and its execution through the writer: small transactions, each followed by a pause
as long as it took. `data.removal.freed_groups` frees a group.

    trained                 once the oldest checkpoint kept covers its step, and it is old enough
    tombstoned, evaluated   once it is old enough
    without a group         tombstoned when found, freed once that is old enough
    everything else         never

Under disk pressure (`keep_bytes`, or short of room) age is ignored and the oldest settled groups
are freed first until usage is below the limit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from forge.core.errors import ForgeError
from forge.core.trajectory import TaskId
from forge.runtime.rpc.chunks import batched
from forge.runtime.telemetry import log
from services.pool.actors.writer import WriterRef
from services.pool.data.commands import FreeGroups, MarkOrphans
from services.pool.data.removal.freed_groups import Freed, is_freed
from services.pool.metrics import (
    COVERED_STEP,
    DAMAGED_ENTRIES,
    FREED_BYTES,
    FREED_GROUPS,
    FREED_RECORDS,
    ORPHANS,
)
from services.pool.readers import ReaderRef
from services.pool.storage.groups.settled_index import SettledGroup
from services.pool.store import PoolStore

PERIOD_S = 5.0
LOOK_AGAIN_S = 600.0
"""Pause after which skipped entries are read again in any case."""
PAGE = 256
"""Entries of the index looked at together."""
BATCH = 16
"""Most groups in one transaction; then the shard's size is looked at again."""
LOOKED_AT = 4096
"""Trajectories looked at with each sweep for those without a group."""
MAX_RECORDS = 128
"""Most turns and rewards deleted in one transaction: a few milliseconds of the writer's time."""
_FREE_S = 60.0


Coverage = Callable[[], Awaitable[int]]
"""Returns the step up to which every kept checkpoint has all training; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Limits by age and size."""

    keep_age_s: float
    keep_bytes: int
    """0: no limit."""

    def due(
        self, group: SettledGroup, *, covered_step: int, now_unix_s: float, pressed: bool
    ) -> bool:
        """Whether a group may be freed; `pressed`: age is ignored."""
        if group.damaged:
            return False
        old = now_unix_s - group.settled_unix_s >= self.keep_age_s
        # An orphan may still be written to: disk pressure does not shorten its age.
        return group.step <= covered_step and (old or (pressed and not group.orphan))


@dataclass(slots=True, kw_only=True)
class _Passed:
    """The beginning of the index, as far as a sweep found nothing to free."""

    until_unix_s: float
    """Time when the first skipped group may be old enough."""
    least_step: float = math.inf
    """Lowest step of a skipped group: a checkpoint of it makes that due."""
    after: bytes = b""
    """Key of the last entry."""
    ended: bool = False
    """The next group waits for its age alone, or for disk pressure."""

    def add(self, group: SettledGroup, *, due: bool, covered_step: int, keep_age_s: float) -> None:
        """Add the next entry; a due group is freed, or cannot be read."""
        if group.step > covered_step:
            self.least_step = min(self.least_step, group.step)
        elif group.orphan and not due:
            self.until_unix_s = min(self.until_unix_s, group.settled_unix_s + keep_age_s)
        elif not (due or group.damaged):
            self.ended = True
        if not self.ended:
            self.after = group.key


class Retention:
    """Frees due groups while the shard is served."""

    def __init__(
        self,
        store: PoolStore,
        writer: WriterRef,
        readers: ReaderRef,
        *,
        policy: RetentionPolicy,
        coverage: Coverage,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._writer = writer
        self._readers = readers
        self._policy = policy
        self._coverage = coverage
        self._now_unix_s = now_unix_s
        self._looked_until = b""
        """Key of the last trajectory checked for its group."""
        self._passed = _Passed(until_unix_s=0.0)
        self._damaged: set[bytes] = set()
        """Keys of damaged entries that were logged."""

    async def run(self) -> None:
        """Sweeps until it is cancelled."""
        while True:
            try:
                await self.sweep()
            except ForgeError as error:
                log.warning("retention_delayed", error=str(error))
            except Exception:
                # A failed sweep must not stop later ones: the disk would fill up.
                log.exception("sweep_crashed")
            await asyncio.sleep(PERIOD_S)

    async def sweep(self) -> Freed:
        """Frees every group that is due; the totals."""
        await self._mark_orphans()
        covered_step = await self._coverage()
        COVERED_STEP.set(covered_step)
        passed = self._still_passed(covered_step)
        total, after = Freed(), passed.after
        while page := await self._read(after):
            after = page[-1].key
            for batch in batched(page, BATCH):
                now_unix_s = self._now_unix_s()
                pressed = await self._readers.run(self._pressed)
                due = partial(
                    self._policy.due,
                    covered_step=covered_step,
                    now_unix_s=now_unix_s,
                    pressed=pressed,
                )
                chosen = [group for group in batch if due(group)]
                if chosen:
                    total = _sum(
                        total, await self._free([one.task_id for one in chosen], covered_step)
                    )
                for group in batch:
                    passed.add(
                        group,
                        due=group in chosen,
                        covered_step=covered_step,
                        keep_age_s=self._policy.keep_age_s,
                    )
            # All that follow were settled later.
            if not pressed and now_unix_s - page[-1].settled_unix_s < self._policy.keep_age_s:
                break
        if total.groups:
            log.info("groups_freed", groups=total.groups, freed_bytes=total.payload_bytes)
        return total

    async def _mark_orphans(self) -> None:
        """Checks a bounded number of trajectories for missing groups."""
        look = partial(self._store.orphans, after=self._looked_until, limit=LOOKED_AT)
        page = await self._readers.run(look)
        self._looked_until = page.last_key
        if page.task_ids:
            command = MarkOrphans(task_ids=page.task_ids, now_unix_s=self._now_unix_s())
            marked: int = await self._writer.ask(command, timeout_s=_FREE_S)
            ORPHANS.inc(marked)
            log.warning("groups_missing", tasks=marked, first=page.task_ids[0])

    def _still_passed(self, covered_step: int) -> _Passed:
        """The part of the index to skip: groups that wait for a checkpoint cost nothing until it is
        there."""
        now_unix_s = self._now_unix_s()
        if covered_step >= self._passed.least_step or now_unix_s >= self._passed.until_unix_s:
            self._passed = _Passed(until_unix_s=now_unix_s + LOOK_AGAIN_S)
        self._passed.ended = False
        return self._passed

    async def _read(self, after: bytes) -> list[SettledGroup]:
        page = await self._readers.run(partial(self._store.settled, after=after, limit=PAGE))
        for group in page:
            if group.damaged and group.key not in self._damaged:
                self._damaged.add(group.key)
                DAMAGED_ENTRIES.inc()
                log.error("settled_entry_damaged", key=group.key.hex())
        return page

    def _pressed(self) -> bool:
        limit = self._policy.keep_bytes
        return self._store.short_of_room or bool(
            limit and self._store.environment.live_bytes > limit
        )

    async def free_archived(self, digests: Mapping[str, bytes]) -> list[str]:
        """Frees groups that are archived, of any age, unless they changed since their digest; the
        tasks whose groups are freed, now or before."""
        covered_step = await self._coverage()
        tasks = [TaskId(task_id) for task_id in digests]
        for batch in batched(tasks, BATCH):
            await self._free(batch, covered_step, digests=digests)
        return await self._readers.run(
            lambda: self._store.read(
                lambda records: [task_id for task_id in tasks if is_freed(records, task_id)]
            )
        )

    async def _free(
        self,
        task_ids: Sequence[TaskId],
        covered_step: int,
        *,
        digests: Mapping[str, bytes] | None = None,
    ) -> Freed:
        command = FreeGroups(
            task_ids=tuple(task_ids),
            covered_step=covered_step,
            max_records=MAX_RECORDS,
            now_unix_s=self._now_unix_s(),
            digests=digests,
        )
        total = Freed()
        unfinished = True
        while unfinished:
            began_s = time.monotonic()
            freed: Freed = await self._writer.ask(command, timeout_s=_FREE_S)
            FREED_GROUPS.inc(freed.groups)
            FREED_RECORDS.inc(freed.records)
            FREED_BYTES.inc(freed.payload_bytes)
            total, unfinished = _sum(total, freed), freed.unfinished
            # Retention takes at most half of the writer's time.
            await asyncio.sleep(time.monotonic() - began_s)
        return total


def _sum(one: Freed, other: Freed) -> Freed:
    return Freed(
        groups=one.groups + other.groups,
        records=one.records + other.records,
        payload_bytes=one.payload_bytes + other.payload_bytes,
    )
