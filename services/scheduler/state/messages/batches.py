"""Messages about batches: leases of trainers, commits, releases and rewinds.

The commits actor prepares and applies its messages with the others, which are to the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.v1 import common_pb2
from services.scheduler.long_polls import new_answer
from services.scheduler.state.messages.groups import NOT_LOOKED_UP, LookedUp
from services.scheduler.state.stored_group import StoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBatch:
    """Answered by the future `answer`, done once a batch is available."""

    trainer_id: str
    max_groups: int
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Task ids by batch id, of batches that the trainer still works on."""
    answer: asyncio.Future[BatchView] = field(default_factory=new_answer, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group and its counted trajectories."""

    record: common_pb2.GroupRecord
    trajectory_ids: tuple[str, ...]
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """One batch for a trainer."""

    batch_id: str
    groups: tuple[GroupView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewBatch:
    """Extends the lease of a batch."""

    batch_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatch:
    """To commits: commits a batch under an optimizer step. To the queue: answered by task ids by
    pool shard, to be stored as TRAINED, or by a LookUp; empty if the commit is complete."""

    batch_id: str
    step: int
    task_ids: Sequence[str]
    looked_up: LookedUp = NOT_LOOKED_UP


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyCommit:
    """The groups of a batch are stored as TRAINED."""

    batch_id: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseBatch:
    """To commits: returns a batch."""

    batch_id: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By task id, why a group is tombstoned; the others go back."""
    reason: str = ""
    """The same for all groups of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRelease:
    """Answered by task ids by pool shard; empty if the batch is not leased."""

    batch_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRelease:
    """Returns the groups of a batch to the window; those with a reason are stored TOMBSTONED."""

    batch_id: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By task id, why a group is tombstoned; the others go back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """To commits: answered by the number of groups made visible again."""

    step: int
    fence: int = 0
    """Fence of the trainer's leadership; 0: not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindForgotten:
    """Answered by the pool shards with groups that were trained after a step and are not in memory.
    RecallGroups with these groups precedes PrepareRewind."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallGroups:
    """All groups of these shards that were trained after a step, from the pool."""

    groups: Sequence[StoredGroup]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRewind:
    """Answered by a RewindPlan."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindPlan:
    """Changes that must be durable before a rewind is applied."""

    void_before: tuple[int, int]
    """See `Batches.void_before`; for the term record."""
    groups: Mapping[str, Sequence[str]]
    """Task ids by pool shard, to be stored as PENDING."""
    head: int
    """Lower bound of the head after the rewind; for the term record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRewind:
    """Answered by the number of groups made visible again."""

    step: int
