"""Mode adaptive: as much generation as two bounds allow, one on staleness, one on shift.

    staleness  99th percentile of the optimizer steps from the start of a group to its training
    shift      divergence of the mix of a batch from that of the queue (`mix_shift`)

Owns three decisions and their state: whether one more group may start, the size of the window, and
which groups make a batch. docs/scheduler.md has the rules and their reasons. With a bound S on
staleness and batches of B groups:

- At most S B groups are started and not trained on, half a batch less once that is little against
  the groups trained since the queue was last empty. W = 2 S B.
- A batch contains the groups that would be late otherwise (`forge.core.queue.selection.staleness`),
  then from each kind of group its share of the queue, oldest first. It waits while its shift, or
  that of a later batch of the groups that it leaves behind, exceeds the bound, but no longer than a
  FIFO.
- The mix of the queue is estimated from the oldest groups that have all ended.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from forge.core.queue.admission import QueueSettings
from forge.core.queue.group_counts import STARTED, GroupCounts
from forge.core.queue.groups import Group, Phase
from forge.core.queue.selection.mix_shift import UNKNOWN, GroupTraits, kind_of, shift_kl
from forge.core.queue.selection.selection import Demand, Selection
from forge.core.queue.selection.staleness import MAY_LAG, Deadlines, Due
from forge.core.queue.window.window import Window

SAMPLE_BATCHES, SAMPLE_GROUPS = 8, 2048
"""The mix is estimated from at least this many batches and groups that ended, in queue order."""
SPARE_BATCHES = 0.5
"""Batches of the S that are kept back, so that a batch has a choice."""
SPARE_SHARE = 0.01
"""Largest share kept back, of the batches trained since the queue was last empty."""
LOOKS_PER_BATCH = 16
"""A waiting batch is weighed again after 1/16 of a batch completed."""


class Adaptive(Selection):
    """Mode adaptive."""

    admission = "adaptive"

    def __init__(self, settings: QueueSettings) -> None:
        self._concurrency = settings.concurrency
        self._max_shift_kl = settings.max_shift_kl
        steps = max(1, math.floor(settings.max_staleness_p99))
        history = max(1000, steps * settings.batch_groups)
        self._deadlines = Deadlines(steps, history=history)
        self._set_batch_size(settings.batch_groups)
        self._started_s: dict[int, float] = {}
        """Start time by queue index, of groups that have not ended."""
        self._ended: dict[int, GroupTraits | None] = {}
        """By queue index, from the frontier on; None: no known kind."""
        self._frontier = 0
        """Every group below this index has ended."""
        self._sample: deque[GroupTraits] = deque()
        self._sampled: Counter[GroupTraits] = Counter()
        self._complete: defaultdict[GroupTraits, list[int]] = defaultdict(list)
        """Sorted queue indices of complete groups, by kind."""
        self._groups: dict[int, Group] = {}
        """The complete groups, by queue index."""
        self._kinds: dict[int, GroupTraits] = {}
        """By queue index, of groups that have ended and are not trained on."""
        self._carry: defaultdict[GroupTraits, float] = defaultdict(float)
        self._steps_on = 0
        """Steps since the queue was last empty."""
        self._changes = 0
        self._weighed_at = -math.inf

    def _set_batch_size(self, size: int) -> None:
        """Sets the size of the batches that `choose` makes."""
        self._size = size
        self.most_open = self._deadlines.bound_steps * size
        """S B: groups that may be started and not trained on and still be in time in some order."""
        self.running_limit = min(self._concurrency, self.most_open)
        self.window_size = 2 * self.most_open

    @property
    def open_limit(self) -> int:
        """Most groups that are started and not trained on while the queue grows."""
        batches = max(1.0, self._deadlines.bound_steps - self._spare_batches)
        return math.ceil(batches * self._size)

    @property
    def staleness_p99(self) -> float:
        """Staleness of the groups trained on last; 0 before the first."""
        return self._deadlines.staleness_p99

    @property
    def _spare_batches(self) -> float:
        return SPARE_BATCHES if SPARE_SHARE * self._steps_on >= SPARE_BATCHES else 0.0

    def admits(self, group: Group, window: Window, counts: GroupCounts) -> bool:
        """Whether S B, or less for a choice, exceeds the groups started and not trained on. Near
        the head only groups inside the window count: others wait there for the head to move."""
        limit = self.running_limit
        near = group.spec.index < window.head + min(window.size, limit)
        near = near and counts.of(Phase.RUNNING) < limit
        if near and sum(map(window.inside, STARTED)) < self.open_limit:
            return True
        untrained = sum(map(counts.of, STARTED))
        if untrained < self.open_limit:
            return True
        return untrained + counts.of(Phase.QUEUED) <= self.most_open

    def begin_at(self, head: int) -> None:
        """No group below the head has a known kind."""
        self._frontier = head

    def restored(self, groups: Iterable[Group]) -> None:
        """Groups that an earlier term settled have no known kind."""
        for group in groups:
            if group.phase.consumed:
                self.gave_up(group)

    def started(self, group: Group, now_s: float) -> None:
        """Counts the group's staleness and duration from now."""
        self._deadlines.started(group)
        self._started_s[group.spec.index] = now_s

    def completed(self, group: Group, now_s: float) -> None:
        """Notes the kind of a complete group, which a batch may take."""
        index = group.spec.index
        duration_s = now_s - self._started_s.pop(index, math.nan)
        if duration_s >= 0:
            self._kinds[index] = kind_of(group, duration_s)
        self._note_end(index, self._kinds.get(index))
        self._list(group)

    def gave_up(self, group: Group) -> None:
        """Removes a group without a kind: tombstoned, or settled under another leader."""
        index = group.spec.index
        self._deadlines.gave_up(group)
        self._started_s.pop(index, None)
        self._note_end(index, None)
        self._unlist((group,))
        self._kinds.pop(index, None)

    def taken(self, groups: Collection[Group]) -> None:
        """Removes groups that no other batch may take."""
        for group in groups:
            self._deadlines.taken(group)
        self._unlist(groups)

    def came_back(self, groups: Iterable[Group]) -> None:
        """Adds groups that a batch may take again."""
        for group in groups:
            self._list(group)

    def trained(self, groups: Sequence[Group], *, head: int, queued: int) -> None:
        """Measures staleness, and counts steps since the queue was last empty."""
        self._deadlines.trained(groups)
        self._steps_on = self._steps_on + 1 if queued else 0
        for group in groups:
            self._kinds.pop(group.spec.index, None)
        # Indices without a group end when the head passes them.
        for index in range(self._frontier, head):
            self._note_end(index, self._ended.get(index))

    def choose(self, window: Window, demand: Demand) -> list[Group]:
        """A batch within both bounds; W follows the size of the batch."""
        waiting = window.more_coming(growing=demand.growing) or (
            window.sampling(demand.away) and demand.can_progress()
        )
        self._set_batch_size(demand.size)
        chosen = self._choose(window, demand, waiting=waiting)
        window.resize(self.window_size)
        return chosen

    def _choose(self, window: Window, demand: Demand, *, waiting: bool) -> list[Group]:
        """`waiting`: whether waiting can bring further groups."""
        size, away = demand.size, demand.away
        if waiting and window.ready < size:
            return []
        overtaken = self._deadlines.overtaken(size, edge=window.edge, away=away)
        waiting = waiting and overtaken > 0
        if waiting and self._changes - self._weighed_at < size / LOOKS_PER_BATCH:
            return []
        self._weighed_at = self._changes
        due = self._deadlines.due(
            size, batched=window.inside(Phase.BATCHED), edge=window.edge, away=away
        )
        if waiting and due.lacking:
            return []
        picked = self._pick(window, size, away, due)
        if waiting and len(picked) < size:
            return []
        counts = Counter(kind for kind, _ in picked if kind is not UNKNOWN)
        self.last_shift_kl = shift_kl(counts, self._sampled)
        if waiting and overtaken > MAY_LAG and not self._fair(window, demand, picked):
            return []
        self._weighed_at = -math.inf
        self._settle(counts, size)
        return sorted((group for _, group in picked), key=lambda group: group.spec.index)

    def _fair(
        self, window: Window, demand: Demand, picked: Iterable[tuple[GroupTraits, Group]]
    ) -> bool:
        """Whether the shift of the batch just weighed is within the bound, and that of the batch
        for the groups that it leaves behind."""
        bound, size = self._max_shift_kl, demand.size
        if math.isinf(bound):
            return True
        if not self._share(size) or self.last_shift_kl > bound:
            return False
        behind = self._deadlines.left_behind(
            size,
            {group.spec.index for _, group in picked},
            batched=window.inside(Phase.BATCHED),
            edge=window.edge,
            away=demand.away,
        )
        # With nothing kept back, every started group is due in the order of a FIFO: the next batch
        # must contain all of `behind`, so compare it with as many groups drawn by chance.
        drawn = size if self._spare_batches else len(behind)
        caught_up = self._catch_up(behind, size, demand.now_s)
        return shift_kl(caught_up, self._sampled, drawn=drawn) <= bound

    def _catch_up(
        self, behind: Sequence[Group], size: int, now_s: float
    ) -> defaultdict[GroupTraits, float]:
        """A batch of the groups `behind`, filled up with a fair sample. A running group is slower
        than all groups that ended in less time."""
        counts: defaultdict[GroupTraits, float] = defaultdict(float)
        running: Counter[GroupTraits] = Counter()
        for group in behind:
            index = group.spec.index
            if group.phase is Phase.COMPLETE:
                counts[self._kinds.get(index, UNKNOWN)] += 1
            else:
                age_s = now_s - self._started_s.get(index, now_s)
                running[kind_of(group, age_s)] += 1
        counts.pop(UNKNOWN, None)
        for young, count in running.items():
            slower = {
                kind: known
                for kind, known in self._sampled.items()
                if kind[1:] == young[1:] and kind.duration >= young.duration and known
            } or {young: 1}
            total = sum(slower.values())
            for kind, known in slower.items():
                counts[kind] += count * known / total
        share = self._share(size - len(behind))
        for kind, known in self._sampled.items():
            counts[kind] += share * known
        return counts

    def _pick(
        self, window: Window, size: int, away: frozenset[str], due: Due
    ) -> list[tuple[GroupTraits, Group]]:
        """The due groups, then the share of each kind, oldest first, then the oldest others."""
        picked = [(self._kinds.get(group.spec.index, UNKNOWN), group) for group in due.groups]
        taken = {group.spec.index for group in due.groups}
        among = {group.spec.index for group in due.among}
        edge = max(among) + 1 if among else window.edge
        counts = Counter(kind for kind, _ in picked)
        fair: list[tuple[int, GroupTraits]] = []
        left: dict[GroupTraits, Iterator[int]] = {}
        share = self._share(size)
        for kind, order in self._complete.items():
            wanted = share * self._sampled[kind] + self._carry[kind] - counts[kind]
            quota = max(0, math.floor(wanted + 0.5))
            left[kind] = self._usable(order, edge, away, taken, among)
            fair += [(index, kind) for index in islice(left[kind], quota)]
        # Quotas round up more often than down: the youngest groups wait for the next batch.
        fair.sort()
        missing = max(0, size - len(picked) - len(fair))
        spare = sorted(
            (index, kind) for kind, order in left.items() for index in islice(order, missing)
        )
        rest = (fair + spare)[: max(0, size - len(picked))]
        return (picked + [(kind, self._groups[index]) for index, kind in rest])[:size]

    def _share(self, size: int) -> float:
        """Batch size over sample size; 0 while the sample is smaller than a batch."""
        return size / len(self._sample) if len(self._sample) >= size else 0.0

    def _usable(
        self,
        order: Sequence[int],
        edge: int,
        away: frozenset[str],
        taken: set[int],
        among: set[int],
    ) -> Iterator[int]:
        inside = islice(order, bisect_left(order, edge))
        free = (index for index in inside if index not in taken and (not among or index in among))
        if not away:
            return free
        return (index for index in free if self._groups[index].spec.shard not in away)

    def _settle(self, counts: Counter[GroupTraits], size: int) -> None:
        if share := self._share(size):
            for kind in self._sampled.keys() | counts.keys():
                owed = self._carry[kind] + share * self._sampled[kind] - counts[kind]
                self._carry[kind] = min(1.0, max(-1.0, owed))

    def _list(self, group: Group) -> None:
        index = group.spec.index
        if index not in self._groups:
            self._groups[index] = group
            self._deadlines.came_back(group)
            insort(self._complete[self._kinds.get(index, UNKNOWN)], index)
            self._changes += 1

    def _unlist(self, groups: Iterable[Group]) -> None:
        gone: defaultdict[GroupTraits, list[int]] = defaultdict(list)
        for group in groups:
            index = group.spec.index
            if self._groups.pop(index, None) is not None:
                gone[self._kinds.get(index, UNKNOWN)].append(index)
        for kind, indices in gone.items():
            order = self._complete[kind]
            span = slice(bisect_left(order, min(indices)), bisect_left(order, max(indices)) + 1)
            order[span] = [index for index in order[span] if index in self._groups]

    def _note_end(self, index: int, known: GroupTraits | None) -> None:
        if index >= self._frontier:
            self._ended[index] = known
        while self._frontier in self._ended:
            known = self._ended.pop(self._frontier)
            if known is not None:
                self._sample.append(known)
                self._sampled[known] += 1
            self._frontier += 1
        while len(self._sample) > max(SAMPLE_GROUPS, SAMPLE_BATCHES * self._size):
            self._sampled[self._sample.popleft()] -= 1
