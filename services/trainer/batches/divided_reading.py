"""Reads a batch with all ranks: each data group reads, credits and plans the groups assigned to it.

Owns the assignment and the merge on rank 0, which moves ids, rewards and counts, but no tokens.
A rollout group is read by one rank alone, since its credit and its prefixes stay within it. The
transport of orders is `services.trainer.learner.reading_ranks`.

    ReadGroups -> facts of each group -> credit of the batch -> PlanGroups -> a step
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forge.core.errors import ForgeError
from forge.rl.learner.mini_batches import divide_groups
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.telemetry import log
from forge.runtime.tracing import is_tracing
from forge.v1 import common_pb2, scheduler_pb2
from services.trainer.batches.logged_rollouts import logged_places
from services.trainer.batches.read_orders import (
    CreditedGroup,
    LeasedGroup,
    PlanGroups,
    PlanSettings,
    ReadAnswer,
    ReadGroups,
    ReadOrder,
    error_of,
)
from services.trainer.batches.reading import BatchDraft, PlannedBatch, ReadBatch
from services.trainer.batches.trajectory_fetch import Unreadable, sealed_ids
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.group_facts import GroupCredit, GroupFacts
from services.trainer.samples.samples import BatchSamples, merged

_ATTEMPT_S = 5.0
"""Longest wait of ranks for a shard in one attempt: it may have moved to another address."""

Addresses = Callable[[str], Awaitable[tuple[str, ...]]]
"""Returns the addresses of a pool shard. Raises `Unavailable` if there are none."""


class DataGroups(Protocol):
    """The first ranks of all data groups."""

    @property
    def count(self) -> int:
        """Data groups."""

    async def exchange(self, orders: Sequence[ReadOrder]) -> Sequence[ReadAnswer]:
        """Give each data group its order; returns their answers. Raises `ReadersLost`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSettings:
    """Settings of reading and planning batches."""

    rules: CreditRules
    plan: PlanSettings
    mini_batches: int
    patience_s: float
    """Longest wait for an unreachable shard."""
    logged_rollouts: int = 0
    """Rollouts of a batch that are rows of a table."""


class DividedReading:
    """Reads batches with all ranks."""

    def __init__(
        self, ranks: DataGroups, addresses: Addresses, *, settings: ReadingSettings
    ) -> None:
        self.ranks = ranks
        self.addresses = addresses
        self.settings = settings
        self._numbers = itertools.count(1)

    def begin(self, baselines_s: Mapping[str, float]) -> BatchDraft:
        """See `BatchReading`."""
        return _DividedDraft(
            number=next(self._numbers),
            reading=self,
            baselines_s=baselines_s,
            loads=[0] * self.ranks.count,
        )

    async def exchange(self, orders: Sequence[ReadOrder]) -> Sequence[ReadAnswer]:
        """Raises the error of a data group, too."""
        answers = await self.ranks.exchange(orders)
        for group, answer in enumerate(answers):
            if (error := error_of(answer, group=group)) is not None:
                raise error
        return answers


@dataclass(slots=True, kw_only=True)
class _Assigned:
    """A group that was read."""

    number: int
    reader: int
    facts: GroupFacts
    traceparents: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _DividedDraft:
    number: int
    reading: DividedReading
    baselines_s: Mapping[str, float]
    loads: list[int]
    """Tokens of each data group."""
    read: list[_Assigned] = field(default_factory=list)
    credits: list[GroupCredit] = field(default_factory=list)
    leased: int = 0

    @property
    def groups(self) -> int:
        return len(self.read)

    async def add(self, groups: Sequence[scheduler_pb2.BatchGroup]) -> None:
        loads = list(self.loads)
        readers = assigned([tokens_of(group) for group in groups], loads)
        leases = [self._leased(group) for group in groups]
        answers = await self._read(leases, readers)
        lost = {one: error for answer in answers for one, error in answer.lost.items()}
        if lost:
            raise Unreadable(lost)
        self.loads = loads
        for lease, reader in zip(leases, readers, strict=True):
            answer = answers[reader]
            self.read.append(
                _Assigned(
                    number=lease.number,
                    reader=reader,
                    facts=answer.facts[lease.number],
                    traceparents=answer.traceparents.get(lease.number, ()),
                )
            )

    def _leased(self, group: scheduler_pb2.BatchGroup) -> LeasedGroup:
        self.leased += 1
        return LeasedGroup(
            number=self.leased,
            pool_shard=group.group.pool_shard,
            trajectory_ids=tuple(sealed_ids(group)),
        )

    async def _read(
        self, leases: Sequence[LeasedGroup], readers: Sequence[int]
    ) -> Sequence[ReadAnswer]:
        """Repeats the order, with the addresses of now, while a shard does not answer."""
        settings, loop = self.reading.settings, asyncio.get_running_loop()
        give_up_s = loop.time() + settings.patience_s
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                shards = {one.pool_shard for one in leases}
                addresses = {shard: await self.reading.addresses(shard) for shard in shards}
                return await self.reading.exchange(
                    [
                        ReadGroups(
                            batch=self.number,
                            groups=tuple(
                                lease
                                for lease, reader in zip(leases, readers, strict=True)
                                if reader == group
                            ),
                            addresses=addresses,
                            rules=settings.rules,
                            baselines_s=dict(self.baselines_s),
                            traced=is_tracing(),
                            patience_s=min(_ATTEMPT_S, settings.patience_s),
                        )
                        for group in range(self.reading.ranks.count)
                    ]
                )
            except ForgeError as error:
                if not error.retryable or loop.time() > give_up_s:
                    raise
                log.warning("read_retried", batch=self.number, error=str(error))
                await asyncio.sleep(backoff.next_s())

    async def samples(self) -> BatchSamples:
        batch, self.credits = await asyncio.to_thread(
            merged,
            [one.facts for one in self.read],
            self.reading.settings.rules,
            baselines_s=self.baselines_s,
        )
        return batch

    async def planned(self) -> PlannedBatch:
        settings = self.reading.settings
        updates = self._updates(settings.mini_batches)
        places = logged_places(
            [one.facts.trajectories for one in self.read], settings.logged_rollouts
        )
        rows = [(self.read[group], place) for group, place in places]
        answers = await self.reading.exchange(
            [
                PlanGroups(
                    batch=self.number,
                    groups=tuple(
                        CreditedGroup(number=one.number, credit=credit, update=update)
                        for one, credit, update in zip(
                            self.read, self.credits, updates, strict=True
                        )
                        if one.reader == reader
                    ),
                    updates=1 + max(updates, default=0),
                    rules=settings.rules,
                    settings=settings.plan,
                    rows=tuple((one.number, place) for one, place in rows if one.reader == reader),
                )
                for reader in range(self.reading.ranks.count)
            ]
        )
        found = [iter(answer.rows) for answer in answers]
        return PlannedBatch(
            plan=ReadBatch(number=self.number, plan_s=max(one.plan_s for one in answers)),
            rollouts=tuple(next(found[one.reader]) for one, _ in rows),
            traceparents=tuple(
                dict.fromkeys(call for one in self.read for call in one.traceparents)
            ),
        )

    def _updates(self, mini_batches: int) -> list[int]:
        """The mini-batch of each group, as `mini_batches` divides their samples."""
        updates = [0] * len(self.read)
        trained = [
            place
            for place, (one, credit) in enumerate(zip(self.read, self.credits, strict=True))
            if credit.trained and one.facts.samples
        ]
        sizes = [
            (self.read[place].facts.returns.domain, self.read[place].facts.trained_tokens)
            for place in trained
        ]
        parts = divide_groups(sizes, mini_batches) if mini_batches > 1 else []
        for update, part in enumerate(parts):
            for at in part:
                updates[trained[at]] = update
        return updates


def tokens_of(group: scheduler_pb2.BatchGroup) -> int:
    """Tokens of a leased group, as far as its summaries tell: sampled ones alone for trajectories
    that a pool of an earlier release has closed."""
    return sum(
        one.prompt_tokens + one.sampled_tokens
        for one in group.trajectories
        if one.state == common_pb2.TRAJECTORY_STATE_SEALED
    )


def assigned(tokens: Sequence[int], loads: list[int]) -> list[int]:
    """The data group of each rollout group: the largest first, each to the group with the fewest
    tokens, which are then counted in `loads`."""
    readers = [0] * len(tokens)
    for place in sorted(range(len(tokens)), key=lambda one: (-tokens[one], one)):
        reader = min(range(len(loads)), key=lambda one: (loads[one], one))
        readers[place] = reader
        loads[reader] += max(1, tokens[place])
    return readers
