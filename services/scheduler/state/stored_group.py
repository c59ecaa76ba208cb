"""A stored group of the pool, decoded for the rebuild of a term.

Owns the conversion of the pool's messages into groups of the core. It keeps no message, to save
memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from sys import intern
from typing import NamedTuple

from forge.core.queue.dispatch.failures import FailureKind, kind_of_abandoned
from forge.core.queue.groups import AttemptState, Group, GroupSpec, Phase, StoredAttempt
from forge.core.trajectory import TaskId, parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.state.domain_progress import outcome_of
from services.scheduler.state.task_catalog import TaskEntry

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
    """A group of an earlier term."""

    group: Group
    place: int
    """Order of restoring, over both purposes."""
    entry: TaskEntry
    """The group's entry in the catalog."""
    tag: str
    outcomes: Sequence[float]
    """Two numbers for each rollout that counts as progress, the newest first: Unix time of its seal
    in seconds, and its outcome."""
    at_rest: bool
    """Settled, or without any attempt."""
    settled_unix_s: float
    """Time at which it was settled; 0 if it is not, or if the pool cannot read it."""


def new_group(record: common_pb2.GroupRecord) -> Group:
    """A group without attempts."""
    return Group(_spec(record))


def stored_group(response: pool_pb2.ScanGroupsResponse, *, counted: bool = False) -> StoredGroup:
    """A group of an earlier term; `counted`: the shard's counters have the outcomes of settled
    groups."""
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
        entry=TaskEntry.of(
            record.task, digest=record.task_digest, payload=not group.phase.consumed
        ),
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
        scaffold=intern(task.scaffold),
        size=task.group_size,
        evaluation=task.purpose == common_pb2.PURPOSE_EVAL,
        difficulty=task.difficulty,
        priority=task.priority,
    )


def _attempt(summary: common_pb2.TrajectorySummary) -> StoredAttempt:
    name = parse_trajectory_id(summary.trajectory_id)
    state = _ATTEMPTS.get(summary.state, AttemptState.OPEN)
    if state is AttemptState.ABANDONED and (
        kind_of_abandoned(summary.reason) is FailureKind.INFRASTRUCTURE
    ):
        state = AttemptState.LOST
    return StoredAttempt(name.rollout_index, name.attempt, state)


def _outcomes(group: Group, summaries: Iterable[common_pb2.TrajectorySummary]) -> Sequence[float]:
    if group.spec.evaluation or not (counted := set(group.sealed_ids())):
        return ()
    sealed = (
        (summary.sealed_unix_s, outcome_of(summary))
        for summary in summaries
        if summary.trajectory_id in counted
    )
    # As an array, eight rollouts take 130 bytes; as tuples they would take 900.
    return array("d", chain.from_iterable(sorted(sealed, reverse=True)))
