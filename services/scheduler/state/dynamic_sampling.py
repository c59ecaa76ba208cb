"""Dynamic sampling: groups whose rollouts all have the same outcome are not trained on.

The outcomes of such a group have no advantage; what process rewards and speeds could teach in it is
given up. It is tombstoned as soon as it is complete, with `SAME_OUTCOME`, so that no batch has it
and the head passes it. Owns which groups these are, and how many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from forge.core.queue.group_ledger import Books
from forge.core.queue.groups import SAME_OUTCOME, Group, Phase


class EqualRewards:
    """Told of each rollout of a training group that counts."""

    def __init__(self, books: Books, *, enabled: bool) -> None:
        self._books = books
        self._enabled = enabled
        self._outcomes: defaultdict[str, list[float]] = defaultdict(list)
        """By task id, of groups that are not complete."""
        self.skipped = 0

    def restored(self, groups: Iterable[Group]) -> None:
        """Groups as an earlier term left them, before their rollouts are counted."""
        tombstoned = (group for group in groups if group.phase is Phase.TOMBSTONED)
        self.skipped += sum(group.reason == SAME_OUTCOME for group in tombstoned)

    def left_out(self, skipped: int) -> None:
        """So many groups were skipped by earlier terms, and are not restored."""
        self.skipped += skipped

    def settled(self, group: Group) -> None:
        """Given up before all its rollouts had ended."""
        self._outcomes.pop(group.spec.task_id, None)

    def sealed(self, group: Group, outcome: float) -> None:
        if not self._enabled or group.phase.consumed:
            return
        outcomes = self._outcomes[group.spec.task_id]
        outcomes.append(outcome)
        if len(outcomes) < group.spec.size:
            return
        del self._outcomes[group.spec.task_id]
        # One rollout by itself has a baseline from elsewhere, or none.
        if group.phase is Phase.COMPLETE and len(outcomes) > 1 and len(set(outcomes)) == 1:
            self._books.tombstone(group, SAME_OUTCOME)
            self.skipped += 1
