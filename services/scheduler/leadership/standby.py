"""Copies of the pool shards on a standby, so that it reads only changes when it is elected.

A copy has the pending groups of a shard and a bounded number of the newest settled ones, as of its
mark. A refresh asks for the groups changed since that mark. A shard that no longer knows the mark
(another process serves it, or too much changed) answers with a full scan, which replaces the copy.
Copies are stale caches: they are authoritative after a refresh that follows `raise_fence`, and only
that refresh asks for the counters of settled groups.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from forge.core.errors import FailedPrecondition, ForgeError
from forge.core.queue.groups import Phase
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.shards.pool_shards import ShardScans
from services.scheduler.state.left_out_groups import LeftOut, left_out
from services.scheduler.state.stored_group import StoredGroup, stored_group

FOLLOW_S = 2.0
"""Between two refreshes."""
RETRY_S = 10.0
"""After a failed refresh, so that a damaged shard is not scanned continuously."""
PART_GROUPS = 1000
"""Restored without a pause of the event loop."""

_PLACE = attrgetter("place")


@dataclass(slots=True, kw_only=True)
class RegisteredGroups:
    """The groups of shards that a term registers, at its begin or when they join."""

    groups: list[StoredGroup]
    """In queue order."""
    left_out: Sequence[LeftOut] = ()
    """One entry per shard that left settled groups out."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """By shard, for scans of later changes."""
    unbounded: frozenset[str] = frozenset()
    """Shards of an earlier version, which cannot look groups up: all their groups are kept."""

    def head(self) -> int:
        """Every training group with a lower index is settled."""
        training = (stored.group for stored in self.groups if not stored.group.spec.evaluation)
        pending = (group.spec.index for group in training if not group.phase.consumed)
        return next(pending, self.next_index())

    def next_index(self) -> int:
        """Above the index of each training group."""
        bounds = (shard.next_index for shard in self.left_out)
        return max(self._above(evaluation=False), *bounds, 0)

    def next_eval_index(self) -> int:
        """Above the index of each evaluation group."""
        bounds = (shard.next_eval_index for shard in self.left_out)
        return max(self._above(evaluation=True), *bounds, 0)

    def _above(self, *, evaluation: bool) -> int:
        specs = (stored.group.spec for stored in reversed(self.groups))
        return next((spec.index + 1 for spec in specs if spec.evaluation is evaluation), 0)

    def parts(self) -> Iterator[Sequence[StoredGroup]]:
        """Yields the groups in parts; each is released after it is yielded."""
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
    """Groups trained by this or an earlier step may be left out."""
    left_out_unix_s: float = 0.0
    """Other groups settled up to this time may be left out."""
    mark: str = ""
    groups: dict[str, StoredGroup] = field(default_factory=dict)
    """By task id."""
    settled: pool_pb2.SettledGroups | None = None
    """Counters; set if the last refresh asked for them."""
    _trained: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Tasks by step, if bounded."""
    _trained_held: int = 0
    _others: dict[str, None] = field(default_factory=dict)
    """Task ids of tombstoned or evaluated groups, if bounded, in the order they were settled."""

    @classmethod
    def begun(cls, begin: pool_pb2.ScanGroupsResponse.Begin) -> _Copy:
        return cls(
            bounded=begin.HasField("settled"),
            left_out_step=begin.settled.left_out_step,
            left_out_unix_s=begin.settled.left_out_unix_s,
        )

    def put(self, stored: StoredGroup) -> None:
        """Store the current state of a group."""
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

    def drop(self, task_id: str) -> None:
        """Remove a group that moved to another shard."""
        stored = self.groups.pop(task_id, None)
        if stored is not None:
            self._unlist(task_id, stored)

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
        """Leave out the oldest settled groups: about `most` trained ones stay, in whole steps, and
        `most` others."""
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
        """`most_settled`: trained groups kept over all shards, and as many other settled ones."""
        self._shards = shards
        self._most_settled = most_settled
        self._copies: dict[str, _Copy] = {}

    async def follow(self) -> None:
        """Keeps a copy of each registered shard fresh, until cancelled."""
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
        # As in a term: the garbage collector must not walk long-lived groups each time.
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
            groups=self.size(shard),
            scan_s=time.monotonic() - started_s,
        )

    async def refresh(self, shard: str, *, count: bool = False) -> int:
        """Brings the copy of a shard up to date, with the counters of settled groups if `count`.
        Returns how many groups the shard sent.

        If it raises, the copy is unchanged, or absent.
        """
        returned = await self._refresh(shard, most=self._most(), count=count)
        copy = self._copies[shard]
        if copy.bounded and count and copy.settled is None:
            # The counters of the shard are damaged: read and count every group.
            del self._copies[shard]
            returned = await self._refresh(shard, most=0, count=False)
        return returned

    async def _refresh(self, shard: str, *, most: int, count: bool) -> int:
        """`most`: 0 for no bound."""
        copy = self._copies.get(shard) or _Copy()
        mark, settled, changed = "", None, list[StoredGroup]()
        moved: list[str] = []
        responses = self._shards.scan(
            shard, since=copy.mark, settled_limit=most, count_settled=count
        )
        async for response in responses:
            if response.HasField("begin"):
                mark = response.begin.mark
                if not response.begin.changes_only:
                    # Drop the old copy first: each may have a million groups.
                    self._copies.pop(shard, None)
                    copy = _Copy.begun(response.begin)
                if count and response.begin.HasField("settled"):
                    settled = response.begin.settled
            elif response.group.state == common_pb2.GROUP_STATE_MOVED:
                moved.append(response.group.task.task_id)
            else:
                changed.append(stored_group(response, counted=copy.bounded))
        if not mark:
            raise FailedPrecondition(f"pool shard {shard} returns no marks: upgrade it first")
        for stored in changed:
            copy.put(stored)
        for task_id in moved:
            copy.drop(task_id)
        if copy.bounded:
            copy.forget(most=most)
        copy.mark, copy.settled = mark, settled
        self._copies[shard] = copy
        return len(changed)

    def _most(self) -> int:
        """Settled groups kept of one shard."""
        return max(1, self._most_settled // max(1, len(self._shards.live())))

    def size(self, shard: str) -> int:
        """Groups in the copy of a shard."""
        return len(self._copies[shard].groups)

    def hand_over(self, names: Iterable[str]) -> RegisteredGroups:
        """Removes and returns the groups of some shards, in queue order; the last refresh of each
        shard must have been with `count`."""
        groups: list[StoredGroup] = []
        beyond: list[LeftOut] = []
        unbounded: list[str] = []
        marks: dict[str, str] = {}
        for shard in sorted(names):
            copy = self._copies.pop(shard)
            groups += copy.groups.values()
            marks[shard] = copy.mark
            if copy.bounded:
                beyond.append(copy.left_out(shard))
            else:
                unbounded.append(shard)
        groups.sort(key=_PLACE)
        return RegisteredGroups(
            groups=groups, left_out=beyond, marks=marks, unbounded=frozenset(unbounded)
        )
