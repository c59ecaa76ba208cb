"""A group as the pool has it, taken apart into what a leader's term is rebuilt from.

Owns the way from the pool's messages to the core's groups. What is taken out is small, and no
message is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from sys import intern
from typing import NamedTuple

from forge.core.queue.failures import FailureKind, kind_of_abandoned
from forge.core.queue.groups import Attempt, AttemptState, Group, GroupSpec, Phase
from forge.core.trajectory import TaskId, parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.state.domain_progress import outcome_of
from services.scheduler.state.task_catalog import Entry

PHASES = {
    common_pb2.GROUP_STATE_TRAINED: Phase.TRAINED,
    common_pb2.GROUP_STATE_TOMBSTONED: Phase.TOMBSTONED,
    common_pb2.GROUP_STATE_EVALUATED: Phase.EVALUATED,
}
_ATTEMPTS = {
    common_pb2.TRAJECTORY_STATE_SEALED: AttemptState.SEALED,
    common_pb2.TRAJECTORY_STATE_ABANDONED: AttemptState.ABANDONED,
}


class StoredGroup(NamedTuple):
    """What an earlier term left of a group."""

    group: Group
    place: int
    """In the order of the queue, over both purposes."""
    entry: Entry
    """Of the catalog."""
    tag: str
    outcomes: Sequence[float]
    """Of the rollouts that count in progress, the latest first: when it was sealed (Unix time,
    seconds), then its outcome."""
    at_rest: bool
    """Over, or not begun: nothing is to be found out about it."""
    settled_unix_s: float
    """When it was settled; 0 for one that is not, and for one that the pool cannot read."""


def new_group(record: common_pb2.GroupRecord) -> Group:
    """A group nobody has sampled yet."""
    return Group(_spec(record))


def stored_group(response: pool_pb2.ScanGroupsResponse, *, counted: bool = False) -> StoredGroup:
    """A group as an earlier term left it; `counted`: the outcomes of settled groups are counted
    elsewhere."""
    record = response.group
    group = Group(_spec(record))
    if response.trajectories:
        group.recall(map(_attempt, response.trajectories))
    group.phase = PHASES.get(record.state, Phase.QUEUED)
    if group.phase.consumed:
        group.batch_id, group.step = intern(record.batch_id), record.step
        group.reason = intern(record.reason)
        group.close()
    return StoredGroup(
        group=group,
        place=2 * record.queue_index + group.spec.evaluation,
        entry=Entry.of(record.task, digest=record.task_digest, payload=not group.phase.consumed),
        tag=intern(record.task.tag),
        outcomes=()
        if counted and record.settled_unix_s
        else _outcomes(group, response.trajectories),
        at_rest=group.phase.consumed or not group.rollouts,
        settled_unix_s=record.settled_unix_s,
    )


def _spec(record: common_pb2.GroupRecord) -> GroupSpec:
    task = record.task
    return GroupSpec(
        task_id=TaskId(task.task_id),
        index=record.queue_index,
        domain=intern(task.domain),
        shard=intern(record.pool_shard),
        size=task.group_size,
        evaluation=task.purpose == common_pb2.PURPOSE_EVAL,
        difficulty=task.difficulty,
        priority=task.priority,
    )


def _attempt(summary: common_pb2.TrajectorySummary) -> Attempt:
    name = parse_trajectory_id(summary.trajectory_id)
    state = _ATTEMPTS.get(summary.state, AttemptState.OPEN)
    if state is AttemptState.ABANDONED and _is_fault(summary.reason):
        state = AttemptState.LOST
    return Attempt(name.rollout_index, name.attempt, state)


def _is_fault(reason: str) -> bool:
    return kind_of_abandoned(reason) is FailureKind.INFRASTRUCTURE


def _outcomes(group: Group, summaries: Iterable[common_pb2.TrajectorySummary]) -> Sequence[float]:
    if group.spec.evaluation or not (counted := set(group.sealed_ids())):
        return ()
    found = (
        (one.sealed_unix_s, outcome_of(one)) for one in summaries if one.trajectory_id in counted
    )
    # As an array, eight rollouts take 130 bytes; as tuples they would take 900.
    return array("d", chain.from_iterable(sorted(found, reverse=True)))
