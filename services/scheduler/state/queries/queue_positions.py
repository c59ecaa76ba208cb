"""The answer of GetQueue: consecutive positions of the training queue, for viewers.

Reads memory alone. Its cost is bounded: by the requested positions, and by the settled groups in
memory (`held_settled_groups`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge.core.queue.groups import Group, Phase, RolloutPhase
from forge.v1 import scheduler_pb2
from services.scheduler.state.term_state import TermState

_PHASES = {
    Phase.QUEUED: scheduler_pb2.QUEUE_PHASE_QUEUED,
    Phase.RUNNING: scheduler_pb2.QUEUE_PHASE_RUNNING,
    Phase.COMPLETE: scheduler_pb2.QUEUE_PHASE_COMPLETE,
    Phase.BATCHED: scheduler_pb2.QUEUE_PHASE_BATCHED,
    Phase.TRAINED: scheduler_pb2.QUEUE_PHASE_TRAINED,
    Phase.TOMBSTONED: scheduler_pb2.QUEUE_PHASE_TOMBSTONED,
}
_GONE = scheduler_pb2.QUEUE_PHASE_GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class GetQueue:
    """To the queue; answered by a GetQueueResponse."""

    first_index: int | None
    """None: `before_head` positions before the head."""
    before_head: int
    positions: int
    details: bool = False


def positions_of(state: TermState, asked: GetQueue) -> scheduler_pb2.GetQueueResponse:
    """The positions at one moment."""
    window = state.queue.window
    edge = window.edge
    first = asked.first_index
    if first is None:
        first = max(0, window.head - asked.before_head)
    end = max(first, min(first + asked.positions, window.next_index))
    phases = bytearray([_GONE]) * (end - first)
    groups = list(_groups(state, first, end))
    for group in groups:
        phases[group.spec.index - first] = _PHASES[group.phase]
    return scheduler_pb2.GetQueueResponse(
        first_index=first,
        phases=bytes(phases),
        head=window.head,
        edge=edge,
        next_index=window.next_index,
        groups=map(_details, sorted(groups, key=_index)) if asked.details else (),
    )


def _groups(state: TermState, first: int, end: int) -> Iterator[Group]:
    for index in range(first, end):
        if (group := state.queue.window.group_at(index)) is not None:
            yield group
    for group in state.queue.ledger.settled_training():
        if first <= group.spec.index < end:
            yield group


def _index(group: Group) -> int:
    return group.spec.index


def _details(group: Group) -> scheduler_pb2.QueuedGroup:
    spec, rollouts = group.spec, group.rollouts
    return scheduler_pb2.QueuedGroup(
        queue_index=spec.index,
        task_id=spec.task_id,
        domain=spec.domain,
        scaffold=spec.scaffold,
        pool_shard=spec.shard,
        phase=_PHASES[group.phase],
        group_size=spec.size,
        sealed=group.sealed,
        leased=sum(one.phase is RolloutPhase.LEASED for one in rollouts),
        waiting=sum(one.phase is RolloutPhase.WAITING for one in rollouts),
        failures=sum(one.failures for one in rollouts),
        batch_id=group.batch_id,
        step=group.step,
        reason=group.reason,
        sealed_trajectory_ids=group.sealed_ids(),
        open_trajectory_ids=[one.lease.trajectory_id for one in rollouts if one.lease],
    )
