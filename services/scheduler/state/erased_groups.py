"""Groups that the pool erased while they were in the queue.

Owns how they leave it. A group in a batch stays: its trainer learns from the pool that it is
erased.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import ERASED

MAX_EARLY = 65_536
"""Most tasks in `ErasedGroups`; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteErased:
    """The pool erased these tasks; answered by the number of groups that leave the queue."""

    task_ids: Sequence[str]


class ErasedGroups:
    """The erased groups of one term."""

    def __init__(self, queue: GenerationQueue) -> None:
        self._queue = queue
        self._early: dict[str, None] = {}
        """Tasks that are not in memory: settled and forgotten, or stored and not yet added."""

    def note(self, task_ids: Iterable[str]) -> int:
        """Tombstones the pending groups of erased tasks; their number."""
        dropped = 0
        for task_id in task_ids:
            if task_id in self._queue.ledger:
                dropped += self._drop(task_id)
                continue
            self._early[task_id] = None
            if len(self._early) > MAX_EARLY:
                del self._early[next(iter(self._early))]
        return dropped

    def added(self, task_id: str) -> None:
        """Note a stored group that was added to the queue; it may be erased by now."""
        if task_id in self._early:
            del self._early[task_id]
            self._drop(task_id)

    def _drop(self, task_id: str) -> bool:
        droppable = self._queue.ledger.group(task_id).phase.droppable
        self._queue.rollouts.drop((task_id,), reason=ERASED)
        return droppable
