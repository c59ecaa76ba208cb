"""What may be asked of the actors of one leader's term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.core.queue.activity import Activity
from forge.core.queue.failures import FailureKind
from forge.runtime.actor_system import ActorRef
from forge.v1 import common_pb2
from services.scheduler.state.left_out_groups import LeftOut
from services.scheduler.state.stored_group import StoredGroup

# To the queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Who the others are; the first message."""

    own: ActorRef
    archivist: ActorRef
    inspector: ActorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissRunner:
    """Its calls that wait are answered with nothing."""

    runner_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRollouts:
    """Answered by a future of tuple[Grant, ...]: done as soon as there is one."""

    runner_id: str
    max_rollouts: int


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
    """Answered by the ids that are lost."""

    lease_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """The answer to a question about groups that are not held and may be settled: to be asked again
    with a LookedUp."""

    task_ids: Sequence[str]
    batch_ids: Sequence[str]
    shards: frozenset[str]
    """Pool shards that may have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """What pool shards have of groups that are not held."""

    task_ids: frozenset[str] = frozenset()
    """Those that were looked up, found or not."""
    batch_ids: frozenset[str] = frozenset()
    groups: Mapping[str, common_pb2.GroupRecord] = field(default_factory=dict)
    """By task id."""
    commits: Mapping[str, int] = field(default_factory=dict)
    """Step by batch id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateRollouts:
    """Answered by trajectory ids by pool shard, without those of settled groups that are not held,
    or by a LookUp. NotFound names an unknown one."""

    trajectory_ids: Sequence[str]
    looked_up: LookedUp = LookedUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How one attempt ended."""

    trajectory_id: str
    error: str = ""
    permanent: bool = False
    kind: FailureKind = FailureKind.TASK
    silent: bool = False
    """The claim has ended without a word of its runner; nothing of the above is known."""
    summary: common_pb2.TrajectorySummary | None = None
    """What the pool holds of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRollouts:
    reports: Sequence[Report]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBatch:
    """Answered by a future of BatchView: done as soon as there is a batch."""

    trainer_id: str
    max_groups: int
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Tasks by batch id: what the trainer still works on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group and the trajectories of it that count."""

    record: common_pb2.GroupRecord
    trajectory_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    batch_id: str
    groups: tuple[GroupView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewBatch:
    batch_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareCommit:
    """Answered by task ids by pool shard, to be stored as TRAINED, or by a LookUp; empty: nothing
    is left to do."""

    batch_id: str
    step: int
    task_ids: Sequence[str]
    looked_up: LookedUp = LookedUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyCommit:
    batch_id: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRelease:
    """Answered by task ids by pool shard; empty when the batch is not held."""

    batch_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRelease:
    batch_id: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By task id, why a group is tombstoned; the others go back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindForgotten:
    """Answered by the pool shards with groups that were trained after a step and are not in memory:
    they come with RecallGroups before PrepareRewind."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallGroups:
    """All groups of those shards that were trained after a step, as the pool has them."""

    groups: Sequence[StoredGroup]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRewind:
    """Answered by a RewindPlan."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindPlan:
    """What is to be durable before a rewind is applied."""

    void_before: tuple[int, int]
    """Of the batches that are taken back for good; for the term record."""
    groups: Mapping[str, Sequence[str]]
    """Task ids by pool shard, to be stored as PENDING."""
    head: int
    """Where the head will be at the lowest; for the term record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRewind:
    """Answered by the number of groups made visible again."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindNew:
    """Answered by the tasks that are not known, or by a LookUp. InvalidArgument for an id known
    with other content, ResourceExhausted when there is no room for them."""

    tasks: Mapping[str, common_pb2.Task]
    uncertain: frozenset[str] = frozenset()
    """Tasks whose write had no certain outcome: they are new, be they stored."""
    looked_up: LookedUp = LookedUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class AddGroups:
    """Groups that are stored in the pool."""

    records: Sequence[common_pb2.GroupRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreGroups:
    """Groups of an earlier term, found on shards that joined."""

    number: int = 0
    """Counts these messages in a term: one that is repeated changes nothing."""
    groups: Sequence[StoredGroup] = ()
    left_out: Sequence[LeftOut] = ()
    """Of each of the shards, with their last groups."""
    holds_all: bool = False
    """One of them cannot look groups up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAway:
    """Pool shards that hold groups and do not answer."""

    shards: frozenset[str]
    unread: frozenset[str] = frozenset()
    """Those of them that have not been read in this term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTagged:
    """Answered by a Tagged."""

    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """The groups of a tag."""

    task_ids: Sequence[str]
    """Of those in memory, in the order they were submitted."""
    shards: frozenset[str]
    """Pool shards that may have others, which are settled and not held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewGroups:
    """Answered by a GroupView each; groups that are not in memory any more are left out."""

    task_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class NoteHead:
    """To the ledger, which writes into the term record what the queue answers: an index below which
    every group is consumed."""


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Answered by a GetSchedulerStatusResponse."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# To the registrar


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Answered by how many were new, once they are durable."""

    tasks: Mapping[str, common_pb2.Task]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveIndices:
    """A shard that joined has groups: no new one gets an index below these, by purpose."""

    next_index: Mapping[int, int]


# To the ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatch:
    batch_id: str
    step: int
    task_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseBatch:
    batch_id: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By task id, why a group is tombstoned; the others go back."""
    reason: str = ""
    """The same of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """Answered by the number of groups made visible again."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetActivity:
    """Pause, drain or resume; to the ledger, which writes it down and tells the queue."""

    activity: Activity


# To the archivist


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    task_id: str
    state: common_pb2.GroupState.ValueType
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFates:
    """Groups tombstoned or evaluated, by shard, to be stored once it answers."""

    fates: Mapping[str, Sequence[Fate]]


# To the inspector


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Attempts whose claims have ended, by shard: ask the pool what became of them."""

    trajectory_ids: Mapping[str, Sequence[str]]
