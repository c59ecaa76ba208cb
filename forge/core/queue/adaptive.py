"""The adaptive mode: as much generation as two bounds allow, one on staleness, one on shift.

    staleness  the 99th percentile, in optimizer steps from the start of a group to its training
    shift      how far the mix of a batch (duration, domain, difficulty) is from the queue's:
               the Kullback-Leibler divergence, less what chance alone gives a batch of its size
               in the mean

Owns three decisions, and what must be remembered for them: whether one more group may start, how
wide the window is, and which of the groups in it make a batch. The bound S on staleness, with
batches of B groups, is kept in advance and not by feedback, so that tasks which become slower
break nothing:

- At most S B groups are started and not trained on: all of them can be in time then, if only in
  the order of a FIFO. Half a batch less leaves room to choose, and is made up for by that, but
  not soon: so it is kept back only when it is little beside what was trained since the queue was
  last empty, and not where all that is left makes S B or less.
- A batch holds what would be late otherwise (`forge.core.queue.staleness`), and waits for it.
  Groups go on starting meanwhile.
- The rest of it takes from each kind of group its share of the queue, oldest first, because short
  groups are complete first: after a start, when a queue that had run dry fills again, when tasks
  become slower. It waits while it is further from the queue than the bound, or while the groups
  that it leaves behind, which a FIFO would have trained on by then, would put the batch that has
  to hold them further from it. But no longer than a FIFO would: once the next groups of the queue
  are complete, a batch goes out.
- W = 2 S B: while the head is held up, training goes on for S steps.

What the queue is like is learned from the oldest groups of which all have ended: slow ones are not
missing there. It is learned while a batch waits, too, so that a change of tasks halts nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from forge.core.queue.groups import Group, Phase
from forge.core.queue.staleness import MAY_LAG, Deadlines, Due
from forge.core.queue.window import Window

SAMPLE_BATCHES, SAMPLE_GROUPS = 8, 2048
"""At least so much of what has ended, in queue order, is what the queue is like."""
DIFFICULTY_BINS = 4
SPARE_BATCHES = 0.5
"""How many of the S batches that could still be trained on in time are not started."""
SPARE_SHARE = 0.01
"""Of what was trained since the queue was last empty, at most so much is kept back for that."""
LOOKS_PER_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the adaptive mode must keep to."""

    concurrency: int
    """N: most groups that run, whatever the bounds would allow."""
    batch_groups: int
    staleness_p99: float
    """Optimizer steps."""
    shift_kl: float


class Kind(NamedTuple):
    """What is compared of a group that has ended."""

    duration: int
    """Half octaves."""
    domain: str
    difficulty: int


UNKNOWN = Kind(0, "", -1)
"""Started under another leader, or trained on before a rewind."""


class Adaptive:
    """Told of every training group that starts, completes, is trained on or comes back."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._size = bounds.batch_groups
        """What a trainer asked for last."""
        steps = max(1, math.floor(bounds.staleness_p99))
        self._deadlines = Deadlines(steps, history=max(1000, steps * self._size))
        self._started_s: dict[int, float] = {}
        """By queue index, of groups that have not ended."""
        self._ended: dict[int, Kind | None] = {}
        """By queue index, from the frontier on; None: nothing to learn from."""
        self._frontier = 0
        """Below it, every group has ended."""
        self._sample: deque[Kind] = deque()
        self._sampled: Counter[Kind] = Counter()
        self._complete: defaultdict[Kind, list[int]] = defaultdict(list)
        """Sorted queue indices of complete groups, by kind."""
        self._groups: dict[int, Group] = {}
        """Those groups."""
        self._kinds: dict[int, Kind] = {}
        """By queue index, of groups that have ended and are not trained on."""
        self._carry: defaultdict[Kind, float] = defaultdict(float)
        self._steps_on = 0
        """Taken since the queue was last empty."""
        self._changes = 0
        self._weighed_at = -math.inf
        self.last_shift_kl = 0.0
        """Of the last batch that was weighed."""

    @property
    def most_open(self) -> int:
        """How many groups may be started and not trained on and still be in time in some order."""
        return self._deadlines.bound_steps * self._size

    @property
    def open_limit(self) -> int:
        """How many may be while the queue goes on; those that run are among them."""
        batches = max(1.0, self._deadlines.bound_steps - self._spare_batches)
        return math.ceil(batches * self._size)

    @property
    def running_limit(self) -> int:
        """Most training groups that may run."""
        return min(self._bounds.concurrency, self.most_open)

    @property
    def window_size(self) -> int:
        """W."""
        return 2 * self.most_open

    @property
    def staleness_p99(self) -> float:
        """Of the groups trained on last; 0 before the first."""
        return self._deadlines.staleness_p99

    @property
    def _spare_batches(self) -> float:
        return SPARE_BATCHES if SPARE_SHARE * self._steps_on >= SPARE_BATCHES else 0.0

    def admits(self, *, untrained: int, queued: int) -> bool:
        """Whether one more group may start; `untrained` are started and not trained on."""
        return untrained < self.open_limit or untrained + queued <= self.most_open

    def begin_at(self, head: int) -> None:
        """Every group with a lower index has ended, and there is nothing to learn from it."""
        self._frontier = head

    def started(self, group: Group, now_s: float) -> None:
        self._deadlines.started(group)
        self._started_s[group.spec.index] = now_s

    def completed(self, group: Group, now_s: float) -> None:
        index = group.spec.index
        duration_s = now_s - self._started_s.pop(index, math.nan)
        if duration_s >= 0:
            self._kinds[index] = _kind_of(group, duration_s)
        self._note_end(index, self._kinds.get(index))
        self._list(group)

    def gave_up(self, group: Group) -> None:
        """It is tombstoned, or ended under another leader: there is nothing to learn from it."""
        index = group.spec.index
        self._deadlines.gave_up(group)
        self._started_s.pop(index, None)
        self._note_end(index, None)
        self._unlist((group,))
        self._kinds.pop(index, None)

    def taken(self, groups: Sequence[Group]) -> None:
        """They are in a batch."""
        for group in groups:
            self._deadlines.taken(group)
        self._unlist(groups)

    def came_back(self, groups: Iterable[Group]) -> None:
        """They are complete again: a batch was released, or a step undone."""
        for group in groups:
            self._list(group)

    def trained(self, groups: Sequence[Group], *, head: int, queued: int) -> None:
        """A step was taken, the head is at `head` now, and `queued` groups wait to be started."""
        self._deadlines.trained(groups)
        self._steps_on = self._steps_on + 1 if queued else 0
        for group in groups:
            self._kinds.pop(group.spec.index, None)
        # Indices that nobody holds are passed by the head alone.
        for index in range(self._frontier, head):
            self._note_end(index, self._ended.get(index))

    def choose(
        self, window: Window, size: int, *, away: frozenset[str], waiting: bool, now_s: float
    ) -> list[Group]:
        """The groups of the next batch, in queue order; none while it is better to wait.

        `waiting`: whether that can bring anything.
        """
        self._size = size
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
        self.last_shift_kl = _shift(counts, self._sampled)
        if waiting and overtaken > MAY_LAG and not self._fair(window, size, away, picked, now_s):
            return []
        self._weighed_at = -math.inf
        self._settle(counts, size)
        return sorted((group for _, group in picked), key=lambda group: group.spec.index)

    def _fair(
        self,
        window: Window,
        size: int,
        away: frozenset[str],
        picked: Iterable[tuple[Kind, Group]],
        now_s: float,
    ) -> bool:
        """Whether the batch just weighed is within the bound on shift, and the one that will hold
        what it leaves behind."""
        bound = self._bounds.shift_kl
        if math.isinf(bound):
            return True
        if not self._share(size) or self.last_shift_kl > bound:
            return False
        behind = self._deadlines.left_behind(
            size,
            {group.spec.index for _, group in picked},
            batched=window.inside(Phase.BATCHED),
            edge=window.edge,
            away=away,
        )
        # All that is started is due in the order of a FIFO where nothing is kept back: the next
        # batch must hold all of `behind`, which is to be like as many groups drawn by chance.
        drawn = size if self._spare_batches else len(behind)
        return _shift(self._catch_up(behind, size, now_s), self._sampled, drawn=drawn) <= bound

    def _catch_up(
        self, behind: Sequence[Group], size: int, now_s: float
    ) -> defaultdict[Kind, float]:
        """A batch of the groups `behind`, filled up with a fair sample. Of one that runs it is
        known that it is slower than what has ended in less time."""
        counts: defaultdict[Kind, float] = defaultdict(float)
        running: Counter[Kind] = Counter()
        for group in behind:
            index = group.spec.index
            if group.phase is Phase.COMPLETE:
                counts[self._kinds.get(index, UNKNOWN)] += 1
            else:
                age_s = now_s - self._started_s.get(index, now_s)
                running[_kind_of(group, age_s)] += 1
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
    ) -> list[tuple[Kind, Group]]:
        """What is due, then from each kind its share, oldest first; what is missing then from the
        oldest of all."""
        picked = [(self._kinds.get(group.spec.index, UNKNOWN), group) for group in due.groups]
        held = {group.spec.index for group in due.groups}
        among = {group.spec.index for group in due.among}
        edge = max(among) + 1 if among else window.edge
        counts = Counter(kind for kind, _ in picked)
        fair: list[tuple[int, Kind]] = []
        left: dict[Kind, Iterator[int]] = {}
        share = self._share(size)
        for kind, order in self._complete.items():
            wanted = share * self._sampled[kind] + self._carry[kind] - counts[kind]
            quota = max(0, math.floor(wanted + 0.5))
            left[kind] = self._usable(order, edge, away, held, among)
            fair += [(index, kind) for index in islice(left[kind], quota)]
        # Rounded up more often than down: the youngest wait for the next batch.
        fair.sort()
        missing = max(0, size - len(picked) - len(fair))
        spare = sorted(
            (index, kind) for kind, order in left.items() for index in islice(order, missing)
        )
        rest = (fair + spare)[: max(0, size - len(picked))]
        return (picked + [(kind, self._groups[index]) for index, kind in rest])[:size]

    def _share(self, size: int) -> float:
        """Of what is sampled, in a batch; 0 as long as less is known than a batch."""
        return size / len(self._sample) if len(self._sample) >= size else 0.0

    def _usable(
        self, order: Sequence[int], edge: int, away: frozenset[str], held: set[int], among: set[int]
    ) -> Iterator[int]:
        inside = islice(order, bisect_left(order, edge))
        free = (index for index in inside if index not in held and (not among or index in among))
        if not away:
            return free
        return (index for index in free if self._groups[index].spec.shard not in away)

    def _settle(self, counts: Counter[Kind], size: int) -> None:
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
        gone: defaultdict[Kind, list[int]] = defaultdict(list)
        for group in groups:
            index = group.spec.index
            if self._groups.pop(index, None) is not None:
                gone[self._kinds.get(index, UNKNOWN)].append(index)
        for kind, indices in gone.items():
            order = self._complete[kind]
            span = slice(bisect_left(order, min(indices)), bisect_left(order, max(indices)) + 1)
            order[span] = [index for index in order[span] if index in self._groups]

    def _note_end(self, index: int, known: Kind | None) -> None:
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


def _kind_of(group: Group, duration_s: float) -> Kind:
    difficulty = min(int(group.spec.difficulty * DIFFICULTY_BINS), DIFFICULTY_BINS - 1)
    half_octave = math.floor(2 * math.log2(max(duration_s, 1e-3)))
    return Kind(half_octave, group.spec.domain, difficulty)


def _shift(
    counts: Mapping[Kind, float], expected: Mapping[Kind, float], *, drawn: int | None = None
) -> float:
    """The sum over the traits of the divergence beyond chance, to which `drawn` of the groups, or
    all, are left."""
    return sum(
        _divergence(_by_trait(counts, trait), _by_trait(expected, trait), drawn)
        for trait in range(len(UNKNOWN))
    )


def _by_trait(counts: Mapping[Kind, float], trait: int) -> defaultdict[object, float]:
    found: defaultdict[object, float] = defaultdict(float)
    for kind, count in counts.items():
        found[kind[trait]] += count
    return found


def _divergence(
    counts: Mapping[object, float], expected: Mapping[object, float], drawn: int | None
) -> float:
    kinds = counts.keys() | expected.keys()
    groups = sum(counts.values())
    if not groups:
        return 0.0
    # Half a group more of each: a kind that is new in the batch is rare, not impossible.
    total = sum(expected.values()) + 0.5 * len(kinds)
    divergence = sum(
        count / groups * math.log(count / groups * total / (expected.get(kind, 0.0) + 0.5))
        for kind, count in counts.items()
        if count
    )
    # Of a fair batch, 2 n times the divergence is distributed like chi-squared.
    chance = (len(kinds) - 1) / (2 * groups)
    return max(0.0, divergence - chance * (1.0 if drawn is None else drawn / groups))
