"""Readers that turn leased groups into a batch: this process alone, or all ranks.

Owns the two interfaces, and reading by this process alone. `divided_reading` reads
with all ranks; leases belong to `batch_source`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forge.core.errors import Unavailable
from forge.core.prefix_tree import Sample
from forge.rl.learner.batch_plan import BatchPlan
from forge.runtime.tracing import is_tracing
from forge.v1 import common_pb2, scheduler_pb2
from services.trainer.batches.logged_rollouts import LoggedRollout, logged_rollouts
from services.trainer.batches.traced_calls import traced_calls
from services.trainer.batches.trajectory_fetch import TrajectoryFetch
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.samples import BatchSamples, build_samples

Planner = Callable[[Sequence[Sample]], BatchPlan]


class ReadersLost(Unavailable):
    """A rank that reads does not answer any more: the ranks must start again."""

    retryable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A batch whose trees are at the ranks that read and planned them."""

    number: int
    """Number of the batch among those that the ranks have read."""
    plan_s: float
    """Longest planning of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A batch ready for its step."""

    plan: BatchPlan | ReadBatch
    rollouts: tuple[LoggedRollout, ...] = ()
    """Rows for trackers of experiments."""
    traceparents: tuple[str, ...] = ()
    """Contexts of the traced rollouts of the batch, one for each trace."""


class BatchDraft(Protocol):
    """A batch in preparation."""

    @property
    def groups(self) -> int:
        """Groups so far."""

    async def add(self, groups: Sequence[scheduler_pb2.BatchGroup]) -> None:
        """Read leased groups; all or none of them are added. Raises `Unreadable`, and the error of
        a shard that does not answer."""

    async def samples(self) -> BatchSamples:
        """The batch of the groups so far."""

    async def planned(self) -> PlannedBatch:
        """Plan the batch that `samples` returned last."""


class BatchReading(Protocol):
    """Reads batches."""

    def begin(self, baselines_s: Mapping[str, float]) -> BatchDraft:
        """Begin a batch; `baselines_s` as for `build_samples`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReading:
    """Reads, credits and plans whole batches in this process."""

    fetch: TrajectoryFetch
    plan: Planner
    rules: CreditRules
    logged_rollouts: int = 0
    """Rollouts of a batch that are rows of a table."""

    def begin(self, baselines_s: Mapping[str, float]) -> BatchDraft:
        """See `BatchReading`."""
        return _LocalDraft(reading=self, baselines_s=baselines_s)


@dataclass(slots=True, kw_only=True)
class _LocalDraft:
    reading: LocalReading
    baselines_s: Mapping[str, float]
    read: list[list[common_pb2.Trajectory]] = field(default_factory=list)
    built: tuple[Sample, ...] = ()

    @property
    def groups(self) -> int:
        return len(self.read)

    async def add(self, groups: Sequence[scheduler_pb2.BatchGroup]) -> None:
        self.read.extend(await self.reading.fetch.fetch(groups))

    async def samples(self) -> BatchSamples:
        batch = await asyncio.to_thread(
            build_samples, self.read, self.reading.rules, baselines_s=self.baselines_s
        )
        self.built = batch.samples
        return batch

    async def planned(self) -> PlannedBatch:
        plan = await asyncio.to_thread(self.reading.plan, self.built)
        rows = await asyncio.to_thread(logged_rollouts, self.read, self.reading.logged_rollouts)
        return PlannedBatch(
            plan=plan,
            rollouts=rows,
            traceparents=traced_calls(self.read) if is_tracing() else (),
        )
