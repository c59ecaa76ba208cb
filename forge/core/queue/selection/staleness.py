"""Deadlines of groups: which ones the next batch must contain to keep the bound on staleness.

Owns the order and the step of each start, and the staleness. A group started after step s is due at
step s + S. Batches of B keep every deadline if at most S B groups are started and not trained on,
and each batch contains the groups that do not fit into later ones: of the groups due within j more
steps, all but j B. If that is a whole batch, its older half is fixed, and the rest is chosen from
the oldest 2 B.

One group in 1000 may be late, so that a runner that hangs does not block training.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from forge.core.queue.groups import Group, Phase

LATE_SHARE = 0.001
"""Less than the 99th percentile allows: late groups are long, and shift their batch."""
MAY_LAG = 1
"""Running groups among the next groups of a FIFO that a batch does not wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Groups that the next batch must contain."""

    groups: list[Group]
    """All of these."""
    among: list[Group]
    """If not empty, the rest of the batch is chosen from these: the whole batch is due."""
    lacking: bool
    """Whether due groups still run."""


class Deadlines:
    """Starts and deadlines of the training groups of one term."""

    def __init__(self, bound_steps: int, *, history: int) -> None:
        """`history`: number of trained groups that staleness is measured over."""
        self.bound_steps = bound_steps
        self._step = 0
        self._since: dict[int, float] = {}
        """Step of the start by queue index, of unsettled groups; -inf if unknown."""
        self._open: defaultdict[float, dict[int, Group]] = defaultdict(dict)
        """Groups in no batch, by step of the start and queue index."""
        self._order: dict[int, tuple[int, Group]] = {}
        """By queue index, of unsettled groups: number of earlier starts, and the group."""
        self._begun = 0
        """Number of starts."""
        self._last_index = -1
        self._excused: set[int] = set()
        """Late groups that batches do not wait for."""
        self._staleness: deque[int] = deque(maxlen=history)
        self._late = 0
        """Number of these that exceed the bound."""

    @property
    def staleness_p99(self) -> float:
        """Staleness of the groups trained on last; 0 before the first."""
        ordered = sorted(self._staleness)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    def started(self, group: Group) -> None:
        """Counts the group's deadline from this step."""
        self._open_since(group, self._step)

    def came_back(self, group: Group) -> None:
        """Adds a complete group that is in no batch; due at once if its start is unknown."""
        self._open_since(group, -math.inf)

    def taken(self, group: Group) -> None:
        """Ends the deadline of a group that is in a batch, or tombstoned."""
        index = group.spec.index
        self._excused.discard(index)
        opened = self._open.get(self._since.get(index, math.nan))
        if opened:
            opened.pop(index, None)
            if not opened:
                del self._open[self._since[index]]

    def gave_up(self, group: Group) -> None:
        """Forgets the group and its deadline."""
        self.taken(group)
        self._since.pop(group.spec.index, None)
        self._order.pop(group.spec.index, None)

    def trained(self, groups: Iterable[Group]) -> None:
        """Records a committed step and the staleness of its groups."""
        self._step += 1
        for group in groups:
            since = self._since.pop(group.spec.index, -math.inf)
            self._order.pop(group.spec.index, None)
            if since > -math.inf:
                self._note(self._step - int(since))

    def overtaken(self, size: int, *, edge: int, away: frozenset[str]) -> int:
        """Running groups that a batch of the oldest complete groups would overtake; 0 for the batch
        of a FIFO. At most `MAY_LAG` + 1, also if fewer than `size` are complete."""
        complete = running = 0
        for _, group in self._visible(edge, away):
            if group.phase is Phase.COMPLETE:
                complete += 1
            else:
                running += 1
            if complete == size or running > MAY_LAG:
                return running
        return MAY_LAG + 1

    def left_behind(
        self,
        size: int,
        picked: Container[int],
        *,
        batched: int,
        edge: int,
        away: frozenset[str],
    ) -> list[Group]:
        """Groups that a FIFO would have trained on by its next batch and that are not in `picked`
        (queue indices): at most the oldest `size`."""
        over = self._begun - len(self._order) + batched + size
        behind = (
            group
            for before, group in takewhile(lambda entry: entry[0] < over, self._visible(edge, away))
            if group.spec.index not in picked
        )
        return list(islice(behind, size))

    def due(self, size: int, *, batched: int, edge: int, away: frozenset[str]) -> Due:
        """Groups that the next batch must contain. `batched`: groups in earlier batches. Only
        groups below `edge` and not on the pool shards `away` count."""
        next_step = self._step + math.ceil(batched / size) + 1
        due: list[Group] = []
        lacking = False
        older: list[Collection[Group]] = []
        count = 0
        all_inside = self._last_index < edge and not away
        for since in sorted(self._open):
            later_batches = max(0, since + self.bound_steps - next_step)
            opened: Collection[Group] = self._open[since].values()
            if not all_inside:
                opened = [group for group in opened if _inside(group, edge, away)]
            older.append(opened if later_batches else self._without_excused(opened))
            count += len(older[-1])
            needed = min(size, int(count - later_batches * size))
            if needed > len(due):
                oldest_first = chain.from_iterable(older)
                complete = (group for group in oldest_first if group.phase is Phase.COMPLETE)
                oldest = list(islice(complete, needed if needed < size else 2 * size))
                if len(oldest) >= size:
                    certain = oldest[: max(len(due), size // 2)]
                    return Due(groups=certain, among=oldest, lacking=lacking)
                due = oldest
                lacking = lacking or len(due) < needed
        return Due(groups=due, among=[], lacking=lacking)

    def _visible(self, edge: int, away: frozenset[str]) -> Iterator[tuple[int, Group]]:
        """Groups in no batch, in the order of their starts."""
        for before, group in self._order.values():
            if group.phase is not Phase.BATCHED and _inside(group, edge, away):
                yield before, group

    def _open_since(self, group: Group, step: float) -> None:
        index = group.spec.index
        self._open[self._since.setdefault(index, step)][index] = group
        if index not in self._order:
            self._order[index] = (self._begun, group)
            self._begun += 1
            self._last_index = max(self._last_index, index)

    def _without_excused(self, late: Collection[Group]) -> list[Group]:
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


def _inside(group: Group, edge: int, away: frozenset[str]) -> bool:
    return group.spec.index < edge and group.spec.shard not in away
