"""What an instance that stands by keeps of each pool shard, so that it need not scan when elected.

A copy is what a scan returned and all that was changed up to its mark: the groups that are pending,
and a bounded number of those that are settled, the newest. It is brought up to date by asking what
was changed since; where the shard does not know the mark any more, because another process serves
it or too much was changed, it answers with a scan, and that takes the copy's place. Copies are
stale caches: they are authoritative after a refresh that follows the fence, and only that one asks
for the counters of settled groups.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from forge.core.errors import FailedPrecondition, ForgeError
from forge.core.queue.groups import Phase
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2
from services.scheduler.pool_shards import ShardScans
from services.scheduler.state.left_out_groups import LeftOut, left_out
from services.scheduler.state.stored_group import StoredGroup, stored_group

FOLLOW_S = 2.0
"""From one look at the shards to the next."""
RETRY_S = 10.0
"""After one that failed: a shard that cannot be scanned is not to be scanned all the time."""
PART_GROUPS = 1000
"""Restored at once; for as long as that takes, the process does nothing else."""

_PLACE = attrgetter("place")


@dataclass(slots=True, kw_only=True)
class Enlisted:
    """What a term begins with, or is joined by: the groups of some shards."""

    groups: list[StoredGroup]
    """In queue order."""
    left_out: Sequence[LeftOut] = ()
    """Of the shards that leave settled groups out."""
    whole: frozenset[str] = frozenset()
    """The other shards: they cannot look groups up, so all of theirs are held."""

    def head(self) -> int:
        """Every training group with a lower index is settled."""
        training = (one.group for one in self.groups if not one.group.spec.evaluation)
        pending = (group.spec.index for group in training if not group.phase.consumed)
        return next(pending, self.next_index())

    def next_index(self) -> int:
        """Above the index of each training group."""
        return max([self._above(evaluation=False), *(one.next_index for one in self.left_out)])

    def next_eval_index(self) -> int:
        """The same of evaluation groups."""
        return max([self._above(evaluation=True), *(one.next_eval_index for one in self.left_out)])

    def _above(self, *, evaluation: bool) -> int:
        specs = (one.group.spec for one in reversed(self.groups))
        return next((spec.index + 1 for spec in specs if spec.evaluation is evaluation), 0)

    def parts(self) -> Iterator[Sequence[StoredGroup]]:
        """The groups, a part at a time, and no part is kept."""
        self.groups.reverse()
        while self.groups:
            part = self.groups[: -PART_GROUPS - 1 : -1]
            del self.groups[-PART_GROUPS:]
            yield part


@dataclass(slots=True, kw_only=True)
class _Copy:
    """One shard."""

    bounded: bool = False
    """Settled groups are left out."""
    left_out_step: int = 0
    """Groups that this step trained, or an earlier one, may be left out."""
    left_out_unix_s: float = 0.0
    """The same of others that were settled up to then."""
    mark: str = ""
    groups: dict[str, StoredGroup] = field(default_factory=dict)
    """By task id."""
    settled: pool_pb2.SettledGroups | None = None
    """The counters, if the last refresh asked for them."""
    _trained: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Tasks by step, if bounded."""
    _trained_held: int = 0
    _others: dict[str, None] = field(default_factory=dict)
    """Tasks of groups that were tombstoned or evaluated, if bounded, the longest settled first."""

    @classmethod
    def begun(cls, begin: pool_pb2.ScanGroupsResponse.Begin) -> _Copy:
        return cls(
            bounded=begin.HasField("settled"),
            left_out_step=begin.settled.left_out_step,
            left_out_unix_s=begin.settled.left_out_unix_s,
        )

    def put(self, stored: StoredGroup) -> None:
        """A group as it is now."""
        task_id = stored.group.spec.task_id
        before = self.groups.get(task_id)
        if before is not None:
            self._unlist(task_id, before)
        elif self._is_left_out(stored):
            return
        self.groups[task_id] = stored
        if self.bounded and stored.settled_unix_s:
            if stored.group.phase is Phase.TRAINED:
                self._trained[stored.group.step].add(task_id)
                self._trained_held += 1
            else:
                self._others[task_id] = None

    def _is_left_out(self, stored: StoredGroup) -> bool:
        if stored.group.phase is Phase.TRAINED:
            return stored.group.step <= self.left_out_step
        return 0.0 < stored.settled_unix_s <= self.left_out_unix_s

    def _unlist(self, task_id: str, stored: StoredGroup) -> None:
        if task_id in self._others:
            del self._others[task_id]
        elif task_id in self._trained.get(stored.group.step, ()):
            self._trained[stored.group.step].discard(task_id)
            self._trained_held -= 1

    def forget(self, *, most: int) -> None:
        """Leave out what was settled first, so that about `most` groups that were trained are
        held, to the end of a step, and of others as many."""
        while len(self._others) > most:
            task_id = next(iter(self._others))
            del self._others[task_id]
            gone = self.groups.pop(task_id)
            self.left_out_unix_s = max(self.left_out_unix_s, gone.settled_unix_s)
        while self._trained_held > most and len(self._trained) > 1:
            step = min(self._trained)
            trained = self._trained.pop(step)
            self._trained_held -= len(trained)
            self.left_out_step = max(self.left_out_step, step)
            for task_id in trained:
                del self.groups[task_id]

    def left_out(self, shard: str) -> LeftOut:
        assert self.settled is not None, "the last refresh asks for the counters"
        groups = self.groups.values()
        return left_out(shard, self.settled, groups, last_step=self.left_out_step)


class ShardCopies:
    """The groups of any number of shards, each as of its last refresh."""

    def __init__(self, shards: ShardScans, *, most_settled: int) -> None:
        """`most_settled`: groups held that were trained on, over all shards, and as many others."""
        self._shards = shards
        self._most_settled = most_settled
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

    async def refresh(self, shard: str, *, count: bool = False) -> int:
        """Brings the copy of a shard to what the shard holds now, with the counters of settled
        groups if `count`; how many groups the shard returned.

        Whatever it raises, the copy is as good as before, or there is none.
        """
        returned = await self._refresh(shard, most=self._most(), count=count)
        copy = self._copies[shard]
        if copy.bounded and count and copy.settled is None:
            # Its counters are damaged: every group is read, and counted here.
            del self._copies[shard]
            returned = await self._refresh(shard, most=0, count=False)
        return returned

    async def _refresh(self, shard: str, *, most: int, count: bool) -> int:
        """`most`: 0 for no bound."""
        copy = self._copies.get(shard) or _Copy()
        mark, settled, changed = "", None, list[StoredGroup]()
        responses = self._shards.scan(
            shard, since=copy.mark, settled_limit=most, count_settled=count
        )
        async for response in responses:
            if response.HasField("begin"):
                mark = response.begin.mark
                if not response.begin.changes_only:
                    # Not both at a time: each may be a million groups.
                    self._copies.pop(shard, None)
                    copy = _Copy.begun(response.begin)
                if count and response.begin.HasField("settled"):
                    settled = response.begin.settled
            else:
                changed.append(stored_group(response, counted=copy.bounded))
        if not mark:
            raise FailedPrecondition(f"pool shard {shard} gives no marks: upgrade it first")
        for stored in changed:
            copy.put(stored)
        if copy.bounded:
            copy.forget(most=most)
        copy.mark, copy.settled = mark, settled
        self._copies[shard] = copy
        return len(changed)

    def _most(self) -> int:
        """Of one shard."""
        return max(1, self._most_settled // max(1, len(self._shards.live())))

    def held(self, shard: str) -> int:
        """Groups in the copy of a shard."""
        return len(self._copies[shard].groups)

    def take(self, names: Iterable[str]) -> Enlisted:
        """The groups of some shards, in queue order; the copies are given up, for who rebuilds a
        term from the groups changes them. Each was refreshed with `count` last."""
        groups: list[StoredGroup] = []
        beyond: list[LeftOut] = []
        whole: list[str] = []
        for shard in sorted(names):
            copy = self._copies.pop(shard)
            groups += copy.groups.values()
            if copy.bounded:
                beyond.append(copy.left_out(shard))
            else:
                whole.append(shard)
        groups.sort(key=_PLACE)
        return Enlisted(groups=groups, left_out=beyond, whole=frozenset(whole))
