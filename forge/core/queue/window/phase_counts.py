"""Groups inside the window by phase, domain and pool shard.

Owns the sums alone. `forge.core.queue.window.window` decides which groups are inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from forge.core.queue.groups import Group, Phase

_PLACE = attrgetter("spec.domain", "spec.shard")
_PHASE_AND_PLACE = attrgetter("phase", "spec.domain", "spec.shard")


class PhaseCounts:
    """Counts of groups that are not consumed."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Phase, str, str]] = Counter()
        self.waiting = 0
        """Groups in no batch."""
        self.complete = 0
        """Complete groups in no batch."""

    def clear(self) -> None:
        """Remove all groups."""
        self._counts.clear()
        self.waiting = self.complete = 0

    def add(self, groups: Iterable[Group]) -> None:
        """Count groups in their current phase."""
        for (phase, domain, shard), count in Counter(map(_PHASE_AND_PLACE, groups)).items():
            self._count(phase, domain, shard, count)

    def moved(self, group: Group, before: Phase) -> None:
        """The phase of a group changed."""
        spec = group.spec
        self._count(before, spec.domain, spec.shard, -1)
        self._count(group.phase, spec.domain, spec.shard, 1)

    def moved_together(self, groups: Sequence[Group], before: Phase, phase: Phase) -> None:
        """`moved` for groups that changed from one phase to another together."""
        for (domain, shard), count in Counter(map(_PLACE, groups)).items():
            self._count(before, domain, shard, -count)
            self._count(phase, domain, shard, count)

    def relocated(self, group: Group, before: str) -> None:
        """A group is on another pool shard than `before`."""
        self._count(group.phase, group.spec.domain, before, -1)
        self._count(group.phase, group.spec.domain, group.spec.shard, 1)

    def of(self, phase: Phase, away: frozenset[str] = frozenset()) -> int:
        """Groups of a phase, except those on the pool shards `away`."""
        return sum(count for _, count in self.by_domain((phase,), away))

    def by_domain(self, phases: Sequence[Phase], away: frozenset[str]) -> Iterator[tuple[str, int]]:
        """Domains with counts of groups in these phases, except those on the pool shards `away`. A
        domain may occur several times."""
        for (phase, domain, shard), count in self._counts.items():
            if phase in phases and shard not in away:
                yield domain, count

    def _count(self, phase: Phase, domain: str, shard: str, count: int) -> None:
        if phase.consumed:
            return
        self._counts[phase, domain, shard] += count
        if phase is not Phase.BATCHED:
            self.waiting += count
        if phase is Phase.COMPLETE:
            self.complete += count
