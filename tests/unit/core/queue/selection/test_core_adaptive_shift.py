"""The bound on shift of the adaptive mode: the mix of each batch, through the queue itself."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import pytest

from forge.core.queue.admission import Mode, QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Group, GroupSpec
from forge.core.trajectory import TaskId

BATCH = 16
FOR_EVER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Of tasks."""

    took_s: float
    domain: str = "a"
    difficulty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch."""

    slow: int
    """How many of its groups are of the slow kind."""
    overtaken: int
    """How many of the next groups of the queue ran when it went out, up to a batch of complete
    ones: what a FIFO would have waited for."""


class World:
    """A queue in which each `one_in`-th task is slow, runners enough for all that may start, and a
    trainer that takes every batch there is."""

    def __init__(self, fast: Kind, slow: Kind, *, one_in: int, groups: int, **settings: Any):
        defaults: dict[str, Any] = {
            "concurrency": 256,
            "mode": Mode.ADAPTIVE,
            "batch_groups": BATCH,
            "max_staleness_p99": 8.0,
            "rollout_lease_s": FOR_EVER_S,
            "rollout_timeout_s": FOR_EVER_S,
            "batch_lease_s": FOR_EVER_S,
            "short_batch_after_s": FOR_EVER_S,
        }
        self.queue = GenerationQueue(QueueSettings(**(defaults | settings)))
        self.kinds = [fast if index % one_in else slow for index in range(groups)]
        self.slow = slow
        self.running: list[tuple[float, int, str]] = []
        self.open: dict[int, bool] = {}
        """Started and not trained on, and whether complete."""
        for index, kind in enumerate(self.kinds):
            spec = GroupSpec(
                task_id=TaskId(str(index)),
                index=index,
                domain=kind.domain,
                difficulty=kind.difficulty,
                shard="s",
                size=1,
            )
            self.queue.add_group(Group(spec), now_s=0.0)

    def play(self) -> list[Taken]:
        batches: list[Taken] = []
        self.start(0.0)
        while self.running:
            now_s, index, trajectory_id = heappop(self.running)
            self.queue.rollouts.complete(trajectory_id, now_s=now_s)
            self.open[index] = True
            while batch := self.queue.take_batch(trainer_id="t", max_groups=BATCH, now_s=now_s):
                indices = [int(task_id) for task_id in batch.task_ids]
                slow = sum(self.kinds[index] is self.slow for index in indices)
                batches.append(Taken(slow=slow, overtaken=self.overtaken()))
                self.queue.batches.commit(batch.batch_id, step=len(batches))
                for index in indices:
                    del self.open[index]
            self.start(now_s)
        return batches

    def start(self, now_s: float) -> None:
        for claim in self.queue.rollouts.lease(runner_id="r", max_rollouts=9999, now_s=now_s):
            index = int(claim.task_id)
            self.open[index] = False
            heappush(self.running, (now_s + self.kinds[index].took_s, index, claim.trajectory_id))

    def overtaken(self) -> int:
        seen = Counter[bool]()
        for index in sorted(self.open):
            if seen[True] < BATCH:
                seen[self.open[index]] += 1
        return seen[False]


def divergence_beyond_chance(slow: int, share: float) -> float:
    """Of a batch of two kinds from the queue, less what chance gives in the mean."""
    parts = ((slow / BATCH, share), (1 - slow / BATCH, 1 - share))
    divergence = sum(p * math.log(p / q) for p, q in parts if p)
    return divergence - 1 / (2 * BATCH)


NINE_TIMES_SLOWER = (1.0, 9.0)
A_FIFTH_SLOWER = (9.0, 11.0)
"""So little that by their durations they are of one kind."""


@pytest.mark.parametrize("took_s", [NINE_TIMES_SLOWER, A_FIFTH_SLOWER], ids=["nine", "fifth"])
@pytest.mark.parametrize(
    "trait", [{"domain": "b"}, {"difficulty": 0.9}], ids=["domain", "difficulty"]
)
@pytest.mark.parametrize("one_in", [2, 4])
@pytest.mark.parametrize("max_shift_kl", [0.0, 0.05])
def test_each_batch_has_the_mix_of_the_queue(
    took_s: tuple[float, float], trait: dict[str, Any], one_in: int, max_shift_kl: float
) -> None:
    """Of two domains, or difficulties, of different speed: every batch is within the bound, unless
    the next groups of the queue, but for one, are complete; and in the end each has the share."""
    fast, slow = Kind(took_s=took_s[0]), replace(Kind(took_s=took_s[1]), **trait)
    world = World(fast, slow, one_in=one_in, groups=800, max_shift_kl=max_shift_kl)
    batches = world.play()
    assert len(batches) == 800 // BATCH
    for batch in batches:
        if batch.overtaken > 1:
            assert divergence_beyond_chance(batch.slow, 1 / one_in) < max_shift_kl + 0.01
    assert [batch.slow for batch in batches[12:-2]] == [BATCH // one_in] * len(batches[12:-2])


@pytest.mark.parametrize(
    ("max_shift_kl", "fewest"), [(0.0, 8), (0.05, 5), (0.1, 4), (0.2, 3), (0.3, 2), (0.5, 1)]
)
def test_larger_shift_bound_allows_batches_with_fewer_slow_groups(
    max_shift_kl: float, fewest: int
) -> None:
    """Of 16 groups 8 should be slow; the more shift is allowed, the fewer a batch waits for after a
    start. The first one waits until the queue is known."""
    fast, slow = Kind(took_s=9.0), Kind(took_s=11.0, domain="b")
    batches = World(fast, slow, one_in=2, groups=400, max_shift_kl=max_shift_kl).play()
    assert batches[0].slow == 8
    assert min((batch.slow for batch in batches if batch.overtaken > 1), default=8) == fewest


def test_skipped_groups_bound_the_batches_that_skip_them() -> None:
    """Two batches of the start may do with 3 slow groups of 8, but not a third in a row: what the
    first two leave behind would make a batch of too many."""
    fast, slow = Kind(took_s=9.0), Kind(took_s=11.0, domain="b")
    batches = World(fast, slow, one_in=2, groups=400, max_shift_kl=0.2).play()
    assert [batch.slow for batch in batches[1:4]] == [3, 3, 8]


def test_batches_without_a_shift_bound_do_not_wait_for_slow_groups() -> None:
    """Of the first 8 batches, the fast halves make four, without a wait to know the queue; the slow
    groups are taken together when they are due."""
    fast, slow = Kind(took_s=1.0), Kind(took_s=9.0)
    batches = World(fast, slow, one_in=2, groups=400, max_shift_kl=math.inf).play()
    assert [batch.slow for batch in batches[:9]] == [0, 0, 0, 0, 16, 16, 16, 16, 8]
