"""A training run in virtual time, driven by the real core of the scheduler.

Owns the world around `forge.core.queue.generation_queue`: tasks of random length, runners that are
never short, a trainer that takes every batch there is, and the measures. It decides nothing itself.

A step takes no time, unless the workload says how much (`train_s`). Then the trainer holds two
batches, as the real one does: one to train on, which it commits at the end of the step, and the
next one.

Tasks are lognormal (sigma 1.2), and half of them nine times slower; a rollout that takes longer
than the time-out is ended there and scored as it stands. A group is one rollout: it stands for the
slowest of its members.
"""

from __future__ import annotations

import enum
import math
import statistics
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from forge.core.queue.admission import QueueSettings
from forge.core.queue.batches import Batch
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Group, GroupSpec
from forge.core.queue.window.window import Window
from forge.core.trajectory import TaskId

SIGMA = 1.2
BINS = 10
MOST_HELD = 2
"""Batches that a trainer holds: it asks for the next one when it begins a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Durations of rollouts."""

    mean: float = 1.0
    """Before the time-out; the unit of virtual time is up to the caller."""
    slow_share: float = 0.5
    slow_factor: float = 9.0
    timeout_over_mean: float = 4.0

    @property
    def timeout(self) -> float:
        return self.timeout_over_mean * self.mean

    def draw(self, rng: Random) -> float:
        blend = (1 - self.slow_share) + self.slow_share * self.slow_factor
        median = self.mean / (blend * math.exp(SIGMA**2 / 2))
        slow = rng.random() < self.slow_share
        drawn = median * (self.slow_factor if slow else 1.0) * math.exp(SIGMA * rng.gauss(0, 1))
        return min(drawn, self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Submitted groups, and the measured part of the run."""

    batch: int
    steps: int
    """Optimizer steps to simulate."""
    skip: int = 0
    """Steps before the measures begin: 0 measures the cold start too."""
    until: int = 0
    """Steps after which they end; 0: the last."""
    durations: Durations = Durations()
    later: Durations | None = None
    """From the middle of the submitted groups on."""
    train_s: float = 0.0
    """Duration of an optimizer step."""
    wave: int = 0
    """Groups submitted at a time, each time when the queue has run dry; 0: never dry."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run, measured."""

    throughput: float
    """Generation time of the trained groups, over the time of all N places: 1 if no place was idle
    and every group was trained. A short group counts as little."""
    groups: float
    """Groups trained per unit of time, over those that N places which are never idle would generate
    of the queue's own mix. A short group counts as much as a long one."""
    kl: float
    """Mean over batches of the divergence of their durations from the queue's, over deciles."""
    staleness_mean: float
    staleness_p99: float
    """In optimizer steps between start and training of a group."""


class Drive(enum.Enum):
    """Way in which the trainer takes its batches from the core."""

    BATCHES = "batches"
    """As a trainer does: a batch at a time, filled as the mode says."""
    AT_ONCE = "at_once"
    """It asks only once a whole batch is complete in the window, or all that is inside, so that no
    group is assigned and the window does not move before: the rival of the published rule."""
    ITEMS = "items"
    """A group at a time, each committed at once, a step for as many as make a batch: the published
    rule, whatever the core does with a batch. Its steps take no time."""
    AT_COMMIT = "at_commit"
    """As BATCHES, with another rule for the head: only a commit moves it."""


class HeadAtCommit(Window):
    """H is the lowest index that is neither trained on nor given up: what is assigned to a batch or
    in one holds it."""

    @property
    def most_taken(self) -> int:
        return 0


class Simulation:
    """One run. `play` it once."""

    def __init__(
        self, settings: QueueSettings, workload: Workload, drive: Drive = Drive.BATCHES
    ) -> None:
        self._settings = settings
        self._load = workload
        self._drive = drive
        self._collected: list[int] = []
        """Queue indices taken since the last step."""
        self.queue = GenerationQueue(settings)
        if drive is Drive.AT_COMMIT:
            window = HeadAtCommit(size=settings.window_size, shares=self.queue.shares)
            self.queue.ledger.window = window
        self._taken = 0
        """Batches so far."""
        self._held: deque[Batch] = deque()
        """Those that are not committed: the one that is trained on, then the next."""
        self.now_s = 0.0
        self.step = 0
        self._events: list[tuple[float, str]] = []
        """Time at which a trajectory ends; without a name, the end of a step."""
        self._rng = Random(workload.seed)
        self._durations: list[tuple[float, bool]] = []
        """Duration of each group, and whether it is of the later kind."""
        self._leased = 0
        self._started_step: dict[int, int] = {}
        self.batches: list[tuple[float, list[int]]] = []
        """Time of each step, and the groups in it."""
        self.staleness: list[list[int]] = []

    def play(self) -> Outcome:
        self._submit()
        self._lease()
        while self.step < self._load.steps and self._events:
            self.now_s, trajectory_id = heappop(self._events)
            if trajectory_id:
                self.queue.rollouts.complete(trajectory_id, now_s=self.now_s)
            else:
                self._end_step()
            self._take()
            self._submit()
            self._lease()
        return self._measure()

    def _submit(self) -> None:
        """Keep the queue longer than anybody looks, or send the next wave."""
        pending = len(self._durations) - self._leased
        if self._load.wave:
            wanted = self._load.wave if not pending and not self._events else 0
        else:
            wanted = 0 if pending > self._settings.concurrency else 4 * self._settings.concurrency
        half = self._load.batch * self._load.steps // 2
        for _ in range(wanted):
            index = len(self._durations)
            is_later = self._load.later is not None and index >= half
            kind = self._load.later if self._load.later and is_later else self._load.durations
            self._durations.append((kind.draw(self._rng), is_later))
            spec = GroupSpec(
                task_id=TaskId(f"t{index}"), index=index, domain="any", shard="s0", size=1
            )
            self.queue.add_group(Group(spec), now_s=self.now_s)

    def _lease(self) -> None:
        claims = self.queue.rollouts.lease(runner_id="r", max_rollouts=2**20, now_s=self.now_s)
        self._leased += len(claims)
        for claim in claims:
            index = int(claim.task_id[1:])
            self._started_step[index] = self.step
            heappush(self._events, (self.now_s + self._durations[index][0], claim.trajectory_id))

    def _take(self) -> None:
        while len(self._held) < MOST_HELD and (size := self._wanted()):
            # The same trainer asking again gets the same batch.
            name = f"t{self._taken % MOST_HELD}"
            batch = self.queue.take_batch(trainer_id=name, max_groups=size, now_s=self.now_s)
            if batch is None:
                return
            self._taken += 1
            self._held.append(batch)
            if len(self._held) == 1:
                self._begin_step()

    def _begin_step(self) -> None:
        if self._load.train_s and self._drive is not Drive.ITEMS:
            heappush(self._events, (self.now_s + self._load.train_s, ""))
        else:
            self._end_step()

    def _end_step(self) -> None:
        batch, step = self._held.popleft(), self.step + 1
        self._collected += [int(task_id[1:]) for task_id in batch.task_ids]
        self.queue.batches.prepare_commit(batch.batch_id, step=step, task_ids=(), now_s=self.now_s)
        self.queue.batches.commit(batch.batch_id, step=step)
        if self._drive is not Drive.ITEMS or len(self._collected) >= self._load.batch:
            self._step(sorted(self._collected))
            self._collected = []
        if self._held:
            self._begin_step()

    def _wanted(self) -> int:
        """Number of groups that the trainer requests now."""
        if self._drive is Drive.ITEMS:
            return 1
        window, size = self.queue.window, self._load.batch
        if self._drive is not Drive.AT_ONCE or window.ready >= size:
            return size
        open_inside = window.sampling(frozenset()) and self.queue.rollouts.can_progress()
        # A window that is complete gives no more before something of it is taken.
        return window.ready if window.full and not open_inside else 0

    def _step(self, indices: list[int]) -> None:
        self.step += 1
        self.staleness.append([self.step - self._started_step.pop(i) for i in indices])
        self.batches.append((self.now_s, indices))

    def _measure(self) -> Outcome:
        first, last = self._load.skip, self._load.until or len(self.batches)
        chosen = self.batches[first:last]
        began_s = self.batches[first - 1][0] if first else 0.0
        trained = [index for _, indices in chosen for index in indices]
        work_s = sum(self._durations[index][0] for index in trained)
        places_s = self._settings.concurrency * (chosen[-1][0] - began_s)
        kinds = Counter(self._durations[index][1] for index in trained)
        fair_s = sum(count * self._mean_duration_s(later) for later, count in kinds.items())
        stale = sorted(value for step in self.staleness[first:last] for value in step)
        return Outcome(
            throughput=work_s / places_s,
            groups=fair_s / places_s,
            kl=self._mean_kl([indices for _, indices in chosen]),
            staleness_mean=sum(stale) / len(stale),
            staleness_p99=stale[math.ceil(0.99 * len(stale)) - 1],
        )

    def _mean_duration_s(self, later: bool) -> float:
        return statistics.fmean(took_s for took_s, kind in self._durations if kind is later)

    def _mean_kl(self, batches: Sequence[Sequence[int]]) -> float:
        edges = {
            later: Deciles.of([d for d, kind in self._durations if kind is later])
            for later in {kind for _, kind in self._durations}
        }
        return sum(self._kl(batch, edges) for batch in batches) / len(batches)

    def _kl(self, batch: Sequence[int], edges: Mapping[bool, Deciles]) -> float:
        """Divergence of the batch's durations from those of all tasks of the same kind, over
        deciles."""
        seen = [0.0] * BINS
        expected = [0.0] * BINS
        for index in batch:
            duration, later = self._durations[index]
            deciles = edges[later]
            seen[bisect_right(deciles.edges, duration)] += 1 / len(batch)
            for at, mass in enumerate(deciles.masses):
                expected[at] += mass / len(batch)
        return sum(p * math.log(p / q) for p, q in zip(seen, expected, strict=True) if p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deciles:
    """Bounds of each tenth of all durations, and the share that really lies between them (ties are
    many at the time-out)."""

    edges: Sequence[float]
    masses: Sequence[float]

    @classmethod
    def of(cls, durations: Sequence[float]) -> Deciles:
        edges = statistics.quantiles(durations, n=BINS)
        counts = Counter(bisect_right(edges, duration) for duration in durations)
        return cls(edges=edges, masses=[counts[at] / len(durations) for at in range(BINS)])
