"""Messages about pool shards that are removed: retired by an operator, or lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge.core.queue.groups import Phase
from forge.v1 import common_pb2

# To the queue


@dataclass(frozen=True, slots=True, kw_only=True)
class FindMovable:
    """Answered by Movable: pending groups of a pool shard."""

    shard: str
    most: int
    listed: Sequence[str] = ()
    """Task ids that the pool has as pending there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """Pending groups of a pool shard in memory."""

    task_ids: Sequence[str]
    """Groups that may move now."""
    busy: int
    """Groups with leases or in a batch; all groups while runners of an earlier term renew."""
    unknown: Sequence[str] = ()
    """The listed tasks that are not in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsMoved:
    """Groups are on another pool shard now."""

    moved: Mapping[str, tuple[bool, Phase] | None]
    """By task id, (evaluation, phase) of settled groups; None for others."""
    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsOn:
    """Answered by OnShard."""

    shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OnShard:
    """The groups of a pool shard."""

    records: Sequence[common_pb2.GroupRecord]
    """Groups in memory, with their payloads while they are pending."""
    forgotten: Mapping[tuple[bool, Phase], int]
    """Settled groups that are not in memory, by (evaluation, phase)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveShard:
    """A pool shard is gone, and no group is on it."""

    shard: str


# To shard_removals


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireShard:
    """Answered by a RetireShardResponse."""

    shard: str
    cancel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclareShardLost:
    """Answered by a DeclareShardLostResponse."""

    shard: str
