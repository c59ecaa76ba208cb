"""The window: positions of the training queue, and one group of it."""

from __future__ import annotations

from typing import Any

from forge.client.operator import Operator
from forge.core.enum_words import enum_word
from forge.core.errors import NotFound
from forge.v1 import scheduler_pb2

BEFORE_HEAD = 512
"""Positions before H that the page shows."""
ALIGNED = 256
"""The first position is a multiple of it: cells stay in place while the head moves."""
POSITIONS = 8192
"""Most positions of the page."""
PHASES = "?-qrcbtx"
"""One letter for each number of `QueuePhase`: gone, queued, running, complete, batched, trained,
tombstoned."""


class QueueView:
    """Reads the queue for its page."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    async def read(self) -> dict[str, Any]:
        """The positions around the window."""
        before_head = BEFORE_HEAD + ALIGNED
        found = await self._operator.queue(before_head=before_head, positions=POSITIONS)
        left_out = -found.first_index % ALIGNED
        return {
            "first": found.first_index + left_out,
            "phases": "".join(PHASES[phase] for phase in found.phases[left_out:]),
            "head": found.head,
            "edge": found.edge,
            "next": found.next_index,
        }

    async def group(self, queue_index: int) -> dict[str, Any]:
        """One group. Raises `NotFound` for a position without a group in memory."""
        found = await self._operator.queue(first_index=queue_index, positions=1, details=True)
        if not found.groups:
            raise NotFound(
                f"position {queue_index} has no group in the scheduler's memory: it was settled "
                "long ago, or it is beyond the end of the queue"
            )
        group = found.groups[0]
        return group_row(group) | {
            "inside": found.head <= queue_index < found.edge,
            "taken": queue_index < found.head,
        }


def group_row(group: scheduler_pb2.QueuedGroup) -> dict[str, Any]:
    """A group as plain data."""
    names = (
        *("queue_index", "task_id", "domain", "scaffold", "pool_shard", "group_size", "sealed"),
        *("leased", "waiting", "failures", "batch_id", "step", "reason"),
    )
    phase = enum_word(scheduler_pb2.QueuePhase, group.phase)
    return {name: getattr(group, name) for name in names} | {
        "phase": phase,
        "trajectories": list(group.sealed_trajectory_ids),
        "open": list(group.open_trajectory_ids),
    }
