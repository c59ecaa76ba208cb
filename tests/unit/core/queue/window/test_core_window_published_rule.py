"""Batches follow the published rule, none is short, and shares hold in the long run."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.queue.admission import GenerationLimit
from tests.support.core.filling import LATE_S, add, complete, make_queue, take


@given(st.integers(1, 12), st.integers(1, 8), st.permutations(range(24)))
def test_batches_equal_those_of_the_published_rule(
    window: int, size: int, order: list[int]
) -> None:
    """Each completed item inside [H, H+W) is taken at once; H passes taken items."""
    queue = make_queue("a" * 24, window=window)
    expected = _published(window, size, order)
    found: list[tuple[int, ...]] = []
    for at, index in enumerate(order):
        complete(queue, f"a{index}")
        while batch := take(queue, size, now_s=0.0):
            found.append(tuple(int(task_id[1:]) for task_id in batch.task_ids))
            queue.batches.commit(batch.batch_id, step=len(found))
        assert found == expected[at]


def _published(window: int, size: int, order: list[int]) -> list[list[tuple[int, ...]]]:
    """The batches after each completion, by the rule and nothing else."""
    complete: set[int] = set()
    used: set[int] = set()
    head, filling = 0, []
    batches: list[tuple[int, ...]] = []
    after = []
    for index in order:
        complete.add(index)
        while visible := [i for i in range(head, head + window) if i in complete - used]:
            used.add(visible[0])
            filling.append(visible[0])
            while head in used:
                head += 1
            if len(filling) == size:
                batches.append(tuple(sorted(filling)))
                filling = []
        after.append(list(batches))
    return after


@pytest.mark.parametrize(("concurrency", "window", "size"), [(32, 10, 8), (16, 4, 8)])
def test_no_batch_is_short_before_the_end_of_the_queue(
    concurrency: int, window: int, size: int
) -> None:
    """Not with heavy tails either: a slow head delays a batch, and makes none smaller."""
    queue = make_queue("", concurrency=concurrency, window=window, admission=GenerationLimit.WINDOW)
    for index in range(600):
        add(queue, f"a{index}", index)
    random, running, now_s = Random(0), [(0.0, "")], 0.0
    sizes: Counter[int] = Counter()
    while running:
        now_s, done = heappop(running)
        if done:
            assert queue.rollouts.complete(done)
        while batch := take(queue, size, now_s=LATE_S + now_s):
            sizes[len(batch.task_ids)] += 1
            queue.batches.commit(batch.batch_id, step=sizes.total())
        for claim in queue.rollouts.lease(runner_id="r", max_rollouts=99, now_s=now_s):
            heappush(running, (now_s + random.paretovariate(1.1), claim.trajectory_id))
    assert sizes == {size: 600 // size}


@given(st.lists(st.sampled_from("aab"), min_size=60, max_size=60), st.integers(0, 99))
def test_shares_hold_in_the_long_run(domains: list[str], seed: int) -> None:
    """For any order of completion, each full batch has its quotas as long as the short domain has
    groups inside the window."""
    queue = make_queue("".join(domains), window=60, domain_shares={"a": 1.0, "b": 1.0})
    order = [f"{domain}{index}" for index, domain in enumerate(domains)]
    Random(seed).shuffle(order)
    left = Counter(domains)
    for name in order:
        complete(queue, name)
        while batch := take(queue, 4, now_s=0.0):
            mix = Counter(task_id[0] for task_id in batch.task_ids)
            assert mix == {"a": 2, "b": 2} or min(left["a"], left["b"]) < 2
            left -= mix
            queue.batches.commit(batch.batch_id, step=1)
