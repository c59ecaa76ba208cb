"""By which optimizer step a group must be trained on, to be no staler than a bound.

Owns the steps groups were started in, their staleness, and what the next batch must hold for the
bound. A group started after step s has until step s + S. Batches of B can keep all of that as long
as at most S B groups are started and not trained on, and each batch holds what would not fit into
the later ones: of the groups whose time ends within j more steps, all but j B.

One group in 1000 may be late, so that one runner that hangs does not hold up all training.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from forge.core.groups import Group, Phase

LATE_SHARE = 0.001
"""Less than the 99th percentile allows: what is late is long, and shifts the batch it comes in."""


class Deadlines:
    """Told of every training group that starts, goes into a batch, comes back, or is over."""

    def __init__(self, bound_steps: int, *, history: int) -> None:
        """`history`: over how many groups staleness is counted."""
        self.bound_steps = bound_steps
        self._step = 0
        self._since: dict[int, float] = {}
        """Step by queue index, of groups that are not over; -inf when it is not known."""
        self._open: defaultdict[float, dict[int, Group]] = defaultdict(dict)
        """By that step and queue index, those in no batch."""
        self._excused: set[int] = set()
        """Nobody waits for them any more, although they are late."""
        self._staleness: deque[int] = deque(maxlen=history)
        self._late = 0
        """How many of these are above the bound."""

    @property
    def staleness_p99(self) -> float:
        """Of the groups trained on last; 0 before the first."""
        ordered = sorted(self._staleness)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    def started(self, group: Group) -> None:
        since = self._since.setdefault(group.spec.index, self._step)
        self._open[since][group.spec.index] = group

    def came_back(self, group: Group) -> None:
        """It is complete, and in no batch: one whose start nobody remembers is due at once."""
        since = self._since.setdefault(group.spec.index, -math.inf)
        self._open[since][group.spec.index] = group

    def taken(self, group: Group) -> None:
        """It is in a batch, or given up."""
        index = group.spec.index
        self._excused.discard(index)
        opened = self._open.get(self._since.get(index, math.nan))
        if opened:
            opened.pop(index, None)
            if not opened:
                del self._open[self._since[index]]

    def gave_up(self, group: Group) -> None:
        self.taken(group)
        self._since.pop(group.spec.index, None)

    def trained(self, groups: Iterable[Group]) -> None:
        """A step was taken."""
        self._step += 1
        for group in groups:
            since = self._since.pop(group.spec.index, -math.inf)
            if since > -math.inf:
                self._note(self._step - int(since))

    def due(
        self, size: int, *, batched: int, edge: int, away: frozenset[str]
    ) -> tuple[list[Group], bool]:
        """What the next batch must hold, oldest start first, and whether more of that has still to
        complete. `batched`: groups in batches that go before; only those below `edge` and not on
        the pool shards `away` count."""
        next_step = self._step + math.ceil(batched / size) + 1
        due: list[Group] = []
        lacking = False
        older: list[Group] = []
        for since in sorted(self._open):
            later_batches = max(0, since + self.bound_steps - next_step)
            inside = [
                group
                for index, group in self._open[since].items()
                if index < edge and group.spec.shard not in away
            ]
            older += inside if later_batches else self._without_excused(inside)
            needed = min(size, int(len(older) - later_batches * size))
            if needed > len(due):
                due = [group for group in older if group.phase is Phase.COMPLETE][:needed]
                lacking = lacking or len(due) < needed
        return due, lacking

    def _without_excused(self, late: Sequence[Group]) -> list[Group]:
        return [
            group
            for group in late
            if group.phase is Phase.COMPLETE or not self._excuse(group.spec.index)
        ]

    def _excuse(self, index: int) -> bool:
        late = self._late + len(self._excused - {index}) + 1
        if late > LATE_SHARE * len(self._staleness):
            return index in self._excused
        self._excused.add(index)
        return True

    def _note(self, staleness: int) -> None:
        if len(self._staleness) == self._staleness.maxlen:
            self._late -= self._staleness[0] > self.bound_steps
        self._staleness.append(staleness)
        self._late += staleness > self.bound_steps
