"""Messages to the actors of one leader's term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.core.queue.activity import Activity
from forge.core.queue.dispatch.failures import FailureKind
from forge.core.queue.groups import ANY, Abilities
from forge.runtime.actors.actor_system import ActorRef
from forge.v1 import common_pb2
from services.scheduler.shards.pool_shards import Change
from services.scheduler.state.left_out_groups import LeftOut
from services.scheduler.state.stored_group import StoredGroup

# To the queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """References to the peer actors; precedes all other messages."""

    queue: ActorRef
    outcome_writer: ActorRef
    expired_leases: ActorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissRunner:
    """Answers waiting calls of a runner with no rollout."""

    runner_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRollouts:
    """Answered by a future of tuple[Grant, ...], done once a rollout is available."""

    runner_id: str
    max_rollouts: int
    abilities: Abilities = ANY
    start_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One rollout for a runner."""

    trajectory_id: str
    rollout_index: int
    failures: int
    pool_shard: str
    task: common_pb2.Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewRollouts:
    """Answered by the ids of lost leases."""

    lease_ids: Sequence[str]
    runner_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """An answer: groups of the question may be only in the pool. Look them up there, and ask again
    with a LookedUp."""

    task_ids: Sequence[str]
    batch_ids: Sequence[str]
    shards: frozenset[str]
    """Pool shards that may have these groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """Groups and commits that were looked up in the pool."""

    task_ids: frozenset[str] = frozenset()
    """Looked up, found or not."""
    batch_ids: frozenset[str] = frozenset()
    groups: Mapping[str, common_pb2.GroupRecord] = field(default_factory=dict)
    """By task id."""
    commits: Mapping[str, int] = field(default_factory=dict)
    """Step by batch id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateRollouts:
    """Answered by trajectory ids by pool shard, without those of settled groups that only the pool
    has, or by a LookUp. NotFound names an unknown id."""

    trajectory_ids: Sequence[str]
    looked_up: LookedUp = LookedUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The end of one attempt."""

    trajectory_id: str
    error: str = ""
    permanent: bool = False
    kind: FailureKind = FailureKind.TASK
    silent: bool = False
    """The lease expired without a report; the fields above are unset."""
    summary: common_pb2.TrajectorySummary | None = None
    """Its record in the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRollouts:
    """Ends of attempts, reported by runners or found in the pool."""

    reports: Sequence[Report]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBatch:
    """Answered by a future of BatchView, done once a batch is available."""

    trainer_id: str
    max_groups: int
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Task ids by batch id, of batches that the trainer still works on."""


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
class PrepareCommit:
    """Answered by task ids by pool shard, to be stored as TRAINED, or by a LookUp; empty if the
    commit is complete."""

    batch_id: str
    step: int
    task_ids: Sequence[str]
    looked_up: LookedUp = LookedUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyCommit:
    """The groups of a batch are stored as TRAINED."""

    batch_id: str
    step: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FindNew:
    """Answered by the new tasks, or by a LookUp. InvalidArgument for a known id with different
    content, ResourceExhausted if the queue is full."""

    tasks: Mapping[str, common_pb2.Task]
    uncertain: frozenset[str] = frozenset()
    """Tasks whose write ended in doubt: new, even if the pool has them."""
    looked_up: LookedUp = LookedUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class AddGroups:
    """New groups, stored in the pool."""

    records: Sequence[common_pb2.GroupRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreGroups:
    """Groups of earlier terms on pool shards that joined."""

    number: int = 0
    """Counts these messages in a term, so that a repeated one changes nothing."""
    groups: Sequence[StoredGroup] = ()
    left_out: Sequence[LeftOut] = ()
    """One entry per shard, in the last message."""
    holds_all: bool = False
    """A shard of an earlier version, which cannot look groups up, is among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAway:
    """Unreachable pool shards that hold groups."""

    shards: frozenset[str]
    unread: frozenset[str] = frozenset()
    """Those that have not been read in this term."""
    retiring: frozenset[str] = frozenset()
    """Shards whose groups move away: nothing is leased there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTagged:
    """Answered by a Tagged."""

    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """The groups of a tag."""

    task_ids: Sequence[str]
    """Tasks in memory, in the order of submission."""
    shards: frozenset[str]
    """Pool shards that may have settled groups that are not in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewGroups:
    """Answered by a GroupView for each group in memory."""

    task_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class NoteHead:
    """Asks the queue for `lowest_pending`, and stores it in the term record."""


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Answered by a GetSchedulerStatusResponse."""

    with_tombstones: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """The timer of the queue fired."""


# To submissions


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Answered by the number of new tasks, once they are durable."""

    tasks: Mapping[str, common_pb2.Task]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveIndices:
    """Lower bounds of new queue indices, by purpose: shards that joined have groups below them."""

    next_index: Mapping[int, int]


# To commits


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatch:
    """Commits a batch under an optimizer step."""

    batch_id: str
    step: int
    task_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseBatch:
    """Returns a batch."""

    batch_id: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By task id, why a group is tombstoned; the others go back."""
    reason: str = ""
    """The same for all groups of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """Answered by the number of groups made visible again."""

    step: int
    fence: int = 0
    """Fence of the trainer's leadership; 0: not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGroups:
    """Tombstones groups: to commits, answered by their number; to the queue, by their task ids and
    pool shards, and with `stored`, once the pool has their states."""

    task_ids: Sequence[str] = ()
    domain: str = ""
    """Without task ids: every pending group of the domain, and of `scaffold` unless it is empty."""
    scaffold: str = ""
    reason: str
    stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetActivity:
    """Pause, drain or resume: stored in the term record, then applied by the queue."""

    activity: Activity


# To outcome_writer


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFinalStates:
    """Groups tombstoned or evaluated, by pool shard."""

    changes: Mapping[str, Sequence[Change]]


# To expired_leases


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckExpired:
    """Attempts whose leases expired, by pool shard: read them from the pool."""

    trajectory_ids: Mapping[str, Sequence[str]]
