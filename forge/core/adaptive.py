"""The adaptive mode: as much generation as two bounds allow, one on staleness, one on shift.

    staleness  the 99th percentile, in optimizer steps from the start of a group to its training
    shift      how far the mix of a batch (duration, domain, difficulty) is from the queue's:
               the Kullback-Leibler divergence, less what chance alone gives a batch of its size
               (mean and one standard deviation)

Owns three decisions, and what must be remembered for them: how many groups may run, how wide the
window is, and which of the groups in it make a batch. It moves the edge of the window out alone.

- A group that is trained on as soon as it is complete is `duration * rate / batch` steps old, and
  the rate follows from how many run. So the bound S on staleness, with batches of B, allows

      running <= S * B * mean(duration) / p99(duration)

  corrected by what is measured. To run more, and let it wait, would gain nothing.
- W = 1.25 S B, corrected alike: while the head is held up, training goes on for about S steps.
- Short groups are complete first: after a start, when a queue that had run dry fills again, when
  tasks become slower. A batch takes from each kind its share of the queue, oldest first, and waits
  as long as it is further from the queue than the bound and waiting can help.

What the queue is like is learned from the oldest groups of which all have ended: slow ones are not
missing there. It is learned while a batch waits, too, so that a change of tasks halts nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge.core.groups import Group
from forge.core.window import Window

SAMPLE_BATCHES, SAMPLE_GROUPS = 8, 2048
"""At least so much of what has ended, in queue order, is what the queue is like."""
DIFFICULTY_BINS = 4
SLACK = 1.25
"""Of the window, and of what is sampled ahead, over what the bound on staleness needs."""
LOOKS_PER_BATCH = 16
_PRIOR_TAIL = 5.0
"""p99 of durations over their mean, before any is known."""
_GAIN_STEP = 0.003
_GAIN_RANGE = (0.85, 1.15)


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
        self._step = 0
        self._gain = 1.0
        self._tail = _PRIOR_TAIL
        self._started: dict[int, tuple[int, float]] = {}
        """Step and time by queue index, of groups that are not trained on yet."""
        self._start_order: deque[tuple[int, int]] = deque()
        """Step and queue index, of those that may still become overdue."""
        self._overdue: set[int] = set()
        """Running, and as old as the bound on staleness."""
        self._ended: dict[int, tuple[Kind, float] | None] = {}
        """Kind and duration by queue index, from the frontier on; None: nothing to learn from."""
        self._frontier = 0
        """Below it, every group has ended."""
        self._sample: deque[tuple[Kind, float]] = deque()
        self._sampled: Counter[Kind] = Counter()
        self._complete: defaultdict[Kind, list[int]] = defaultdict(list)
        """Sorted queue indices of complete groups, by kind."""
        self._groups: dict[int, Group] = {}
        """Those groups."""
        self._kinds: dict[int, Kind] = {}
        """By queue index, of groups that have ended and are not trained on."""
        self._carry: defaultdict[Kind, float] = defaultdict(float)
        self._staleness: deque[int] = deque(
            maxlen=min(8192, max(1000, math.ceil(bounds.staleness_p99) * bounds.batch_groups))
        )
        self._changes = 0
        self._weighed_at = -math.inf
        self.last_shift_kl = 0.0
        """Of the last batch that was weighed."""

    @property
    def running_limit(self) -> int:
        """How many training groups may run now."""
        bounds = self._bounds
        wanted = self._gain * bounds.staleness_p99 * bounds.batch_groups / self._tail
        return max(1, min(bounds.concurrency, round(wanted)))

    @property
    def window_size(self) -> int:
        """W."""
        wanted = SLACK * self._gain * self._bounds.staleness_p99 * self._bounds.batch_groups
        return max(self._bounds.batch_groups, math.ceil(wanted))

    @property
    def staleness_p99(self) -> float:
        """Of the groups trained on last; 0 before the first."""
        return _p99(self._staleness)

    def admits(self, *, running: int, unfetched: int) -> bool:
        """Whether one more group may start."""
        return running < self.running_limit and running + unfetched < self.window_size

    def started(self, group: Group, now_s: float) -> None:
        index = group.spec.index
        if index not in self._started:
            self._started[index] = self._step, now_s
            self._start_order.append((self._step, index))

    def completed(self, group: Group, now_s: float) -> None:
        index = group.spec.index
        _, started_s = self._started.get(index, (0, math.nan))
        self._overdue.discard(index)
        duration_s = now_s - started_s
        if duration_s >= 0:
            self._kinds[index] = _kind_of(group, duration_s)
            self._note_end(index, (self._kinds[index], duration_s))
        else:
            self._note_end(index, None)
        self._list(group)

    def gave_up(self, group: Group) -> None:
        """It is tombstoned, or ended under another leader: there is nothing to learn from it."""
        index = group.spec.index
        self._started.pop(index, None)
        self._overdue.discard(index)
        self._note_end(index, None)
        if index in self._groups:
            self._unlist(group)
        self._kinds.pop(index, None)

    def taken(self, groups: Iterable[Group]) -> None:
        """They are in a batch."""
        for group in groups:
            if group.spec.index in self._groups:
                self._unlist(group)

    def came_back(self, groups: Iterable[Group]) -> None:
        """They are complete again: a batch was released, or a step undone."""
        for group in groups:
            self._list(group)

    def trained(self, groups: Iterable[Group], *, head: int) -> None:
        """A step was taken, and the head is at `head` now."""
        self._step += 1
        for group in groups:
            step, _ = self._started.pop(group.spec.index, (self._step - 1, 0.0))
            self._kinds.pop(group.spec.index, None)
            self._staleness.append(self._step - step)
        # Indices that nobody holds are passed by the head alone.
        for index in range(self._frontier, head):
            self._note_end(index, self._ended.get(index))
        self._find_overdue()
        self._learn()

    def choose(
        self, window: Window, size: int, *, away: frozenset[str], waiting: bool
    ) -> list[Group]:
        """The groups of the next batch, in queue order; none while it is better to wait.

        `waiting`: whether that can bring anything.
        """
        if waiting and (
            window.ready < size
            or len(self._sample) < self._bounds.batch_groups
            or self._changes - self._weighed_at < size / LOOKS_PER_BATCH
            or len(self._overdue) > 0.01 * self._bounds.staleness_p99 * size
        ):
            return []
        self._weighed_at = self._changes
        picked = self._pick(window, size, away)
        if waiting and len(picked) < size:
            return []
        counts = Counter(kind for kind, _ in picked if kind is not UNKNOWN)
        self.last_shift_kl = _shift(counts, self._sampled)
        if waiting and self.last_shift_kl > self._bounds.shift_kl:
            return []
        self._weighed_at = -math.inf
        self._settle(counts, size)
        return sorted((group for _, group in picked), key=lambda group: group.spec.index)

    def _pick(self, window: Window, size: int, away: frozenset[str]) -> list[tuple[Kind, Group]]:
        """From each kind its share, oldest first; what is missing then from the oldest of all."""
        picked: list[tuple[Kind, Group]] = []
        spare: list[tuple[int, Kind, Group]] = []
        total = max(1, len(self._sample))
        for kind, order in self._complete.items():
            wanted = size * self._sampled[kind] / total + self._carry[kind]
            quota = max(0, math.floor(wanted + 0.5))
            for index in order[: bisect_left(order, window.edge)]:
                group = self._groups[index]
                if group.spec.shard in away:
                    continue
                if quota:
                    picked.append((kind, group))
                    quota -= 1
                else:
                    spare.append((index, kind, group))
                    if len(spare) > 4 * size:
                        break
        spare.sort(key=lambda entry: entry[0])
        picked += [(kind, group) for _, kind, group in spare[: max(0, size - len(picked))]]
        # Rounded up more often than down: the youngest wait for the next batch.
        picked.sort(key=lambda entry: entry[1].spec.index)
        return picked[:size]

    def _settle(self, counts: Counter[Kind], size: int) -> None:
        total = max(1, len(self._sample))
        for kind in self._sampled.keys() | counts.keys():
            owed = self._carry[kind] + size * self._sampled[kind] / total - counts[kind]
            self._carry[kind] = min(1.0, max(-1.0, owed))

    def _list(self, group: Group) -> None:
        index = group.spec.index
        if index not in self._groups:
            self._groups[index] = group
            insort(self._complete[self._kinds.get(index, UNKNOWN)], index)
            self._changes += 1

    def _unlist(self, group: Group) -> None:
        index = group.spec.index
        del self._groups[index]
        order = self._complete[self._kinds.get(index, UNKNOWN)]
        del order[bisect_left(order, index)]

    def _find_overdue(self) -> None:
        old = self._step - self._bounds.staleness_p99
        while self._start_order and self._start_order[0][0] <= old:
            _, index = self._start_order.popleft()
            if index in self._started and index not in self._groups:
                self._overdue.add(index)

    def _note_end(self, index: int, known: tuple[Kind, float] | None) -> None:
        if index >= self._frontier:
            self._ended[index] = known
        while self._frontier in self._ended:
            known = self._ended.pop(self._frontier)
            if known is not None:
                self._sample.append(known)
                self._sampled[known[0]] += 1
            self._frontier += 1
        while len(self._sample) > max(SAMPLE_GROUPS, SAMPLE_BATCHES * self._bounds.batch_groups):
            kind, _ = self._sample.popleft()
            self._sampled[kind] -= 1

    def _learn(self) -> None:
        durations = [duration_s for _, duration_s in self._sample]
        mean = sum(durations) / max(1, len(durations))
        if len(durations) >= self._bounds.batch_groups and mean > 0:
            self._tail = max(1.0, _p99(durations) / mean)
        measured = self.staleness_p99
        if len(self._staleness) == self._staleness.maxlen and measured > 0:
            ratio = min(2.0, max(0.5, self._bounds.staleness_p99 / measured))
            low, high = _GAIN_RANGE
            self._gain = min(high, max(low, self._gain * ratio**_GAIN_STEP))


def _kind_of(group: Group, duration_s: float) -> Kind:
    difficulty = min(int(group.spec.difficulty * DIFFICULTY_BINS), DIFFICULTY_BINS - 1)
    half_octave = math.floor(2 * math.log2(max(duration_s, 1e-3)))
    return Kind(half_octave, group.spec.domain, difficulty)


def _shift(counts: Counter[Kind], expected: Counter[Kind]) -> float:
    """The sum over the traits of the divergence beyond chance."""
    return sum(
        _divergence(_by_trait(counts, trait), _by_trait(expected, trait))
        for trait in range(len(UNKNOWN))
    )


def _by_trait(counts: Counter[Kind], trait: int) -> Counter[object]:
    found: Counter[object] = Counter()
    for kind, count in counts.items():
        found[kind[trait]] += count
    return found


def _divergence(counts: Counter[object], expected: Counter[object]) -> float:
    kinds = counts.keys() | expected.keys()
    groups = counts.total()
    if not groups:
        return 0.0
    # Half a group more of each: a kind that is new in the batch is rare, not impossible.
    total = expected.total() + 0.5 * len(kinds)
    divergence = sum(
        count / groups * math.log(count / groups * total / (expected[kind] + 0.5))
        for kind, count in counts.items()
        if count
    )
    # Of a fair batch, 2 n times the divergence is distributed like chi-squared.
    freedom = len(kinds) - 1
    return max(0.0, divergence - (freedom + math.sqrt(2 * freedom)) / (2 * groups))


def _p99(values: Sequence[float] | deque[int]) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
