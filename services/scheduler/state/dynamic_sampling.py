"""Dynamic sampling: groups whose rollouts all have the same outcome are not trained on.

Their outcomes give no advantage; process rewards and speeds are ignored. Such a group is tombstoned
with `SAME_OUTCOME` as soon as it is complete, so no batch has it and the head passes it. Owns the
choice of these groups and their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from forge.core.queue.group_ledger import GroupLedger
from forge.core.queue.groups import SAME_OUTCOME, Group, Phase


class EqualRewards:
    """Observes every counted rollout of training groups."""

    def __init__(self, ledger: GroupLedger, *, enabled: bool) -> None:
        self._ledger = ledger
        self._enabled = enabled
        self._outcomes: defaultdict[str, list[float]] = defaultdict(list)
        """By task id, of groups that are not complete."""
        self.skipped = 0

    def restored(self, groups: Iterable[Group]) -> None:
        """Groups of earlier terms; precedes their rollouts."""
        tombstoned = (group for group in groups if group.phase is Phase.TOMBSTONED)
        self.skipped += sum(group.reason == SAME_OUTCOME for group in tombstoned)

    def left_out(self, skipped: int) -> None:
        """Earlier terms skipped that many groups that are not restored."""
        self.skipped += skipped

    def settled(self, group: Group) -> None:
        """Forget a group that was tombstoned or evaluated."""
        self._outcomes.pop(group.spec.task_id, None)

    def sealed(self, group: Group, outcome: float) -> None:
        """One more rollout of a group counts; may tombstone the group."""
        if not self._enabled or group.phase.consumed:
            return
        outcomes = self._outcomes[group.spec.task_id]
        outcomes.append(outcome)
        if len(outcomes) < group.spec.size:
            return
        del self._outcomes[group.spec.task_id]
        # A single rollout has no group baseline.
        if group.phase is Phase.COMPLETE and len(outcomes) > 1 and len(set(outcomes)) == 1:
            self._ledger.tombstone(group, SAME_OUTCOME)
            self.skipped += 1
