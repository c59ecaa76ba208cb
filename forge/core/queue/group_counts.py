"""Groups of a term by purpose and phase, and the running ones by pool shard.

Owns the sums alone. `forge.core.queue.group_ledger` reports every change of phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter

from forge.core.queue.groups import Group, GroupSpec, Phase

PENDING = (Phase.QUEUED, Phase.RUNNING, Phase.COMPLETE, Phase.BATCHED)
STARTED = PENDING[1:]
_PURPOSE_AND_PHASE = attrgetter("spec.evaluation", "phase")


class GroupCounts:
    """Counts of all groups, in memory or not."""

    def __init__(self) -> None:
        self._groups: Counter[tuple[bool, Phase]] = Counter()
        """By (evaluation, phase)."""
        self._running: Counter[tuple[bool, str]] = Counter()
        """By (evaluation, pool shard)."""

    def add(self, groups: Iterable[Group]) -> None:
        """Groups that are new to the term."""
        self._groups.update(map(_PURPOSE_AND_PHASE, groups))

    def add_counted(self, counts: Mapping[tuple[bool, Phase], int]) -> None:
        """Settled groups that are not in memory, by (evaluation, phase)."""
        self._groups.update(counts)

    def moved(self, spec: GroupSpec, before: Phase, phase: Phase) -> None:
        """Counts a change of a group's phase."""
        self._groups[spec.evaluation, before] -= 1
        self._groups[spec.evaluation, phase] += 1
        if change := (phase is Phase.RUNNING) - (before is Phase.RUNNING):
            self._running[spec.evaluation, spec.shard] += change

    def moved_together(self, groups: int, before: Phase, phase: Phase) -> None:
        """Counts a change of phase of training groups that do not run."""
        self._groups[False, before] -= groups
        self._groups[False, phase] += groups

    def relocated(self, group: Group, before: str) -> None:
        """Counts a group that is on another pool shard than `before`."""
        if group.phase is Phase.RUNNING:
            self._running[group.spec.evaluation, before] -= 1
            self._running[group.spec.evaluation, group.spec.shard] += 1

    def of(self, phase: Phase, *, evaluation: bool = False) -> int:
        """Groups of one purpose in a phase."""
        return self._groups[evaluation, phase]

    @property
    def running(self) -> int:
        """Running groups of both purposes: these count against N."""
        return self._groups[False, Phase.RUNNING] + self._groups[True, Phase.RUNNING]

    def any_pending(self) -> bool:
        """Whether a group of either purpose is not settled."""
        return any(count and phase in PENDING for (_, phase), count in self._groups.items())

    def runs(self, *, evaluation: bool, away: frozenset[str]) -> bool:
        """Whether a group of a purpose runs on a pool shard that is not in `away`."""
        return any(
            count and purpose is evaluation and shard not in away
            for (purpose, shard), count in self._running.items()
        )

    @property
    def accepted(self) -> int:
        """All training groups."""
        return sum(n for (evaluation, _), n in self._groups.items() if not evaluation)
