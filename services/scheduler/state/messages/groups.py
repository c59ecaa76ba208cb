"""Messages about groups: submissions, look-ups in the pool, and groups of earlier terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.v1 import common_pb2
from services.scheduler.shards.pool_shards import GroupStateChange
from services.scheduler.state.left_out_groups import LeftOut
from services.scheduler.state.stored_group import StoredGroup


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


NOT_LOOKED_UP = LookedUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """To submissions: answered by the number of new tasks, once they are durable."""

    tasks: Mapping[str, common_pb2.Task]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindNew:
    """Answered by the new tasks, or by a LookUp. InvalidArgument for a known id with different
    content, ResourceExhausted if the queue is full."""

    tasks: Mapping[str, common_pb2.Task]
    uncertain: frozenset[str] = frozenset()
    """Tasks whose write ended in doubt: new, even if the pool has them."""
    looked_up: LookedUp = NOT_LOOKED_UP


@dataclass(frozen=True, slots=True, kw_only=True)
class AddGroups:
    """New groups, stored in the pool."""

    records: Sequence[common_pb2.GroupRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveIndices:
    """To submissions: lower bounds of new queue indices, by purpose; shards that joined have groups
    below them."""

    next_index: Mapping[int, int]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGroups:
    """Tombstones groups: to commits, answered by their number; to the queue, by their task ids and
    pool shards; with `stored`, once the pool has their states, by the states of those that cannot
    be dropped by now."""

    task_ids: Sequence[str] = ()
    domain: str = ""
    """Without task ids: every pending group of the domain, and of `scaffold` unless it is empty."""
    scaffold: str = ""
    reason: str
    stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFinalStates:
    """To outcome_writer: groups tombstoned or evaluated, by pool shard."""

    changes: Mapping[str, Sequence[GroupStateChange]]
