"""The routing cost and the choice by it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.placement.routing import Candidate, LearnedRate, LoadGuard, choose, cost_s


def worker(
    name: str,
    *,
    queue_s: float = 0.0,
    cached: int = 0,
    prefill_s: float = 1.0,
    migration_s: float = math.inf,
) -> Candidate:
    return Candidate(
        worker=name,
        queue_delay_s=queue_s,
        cached_tokens=cached,
        prefill_s_per_token=prefill_s,
        migration_s_per_token=migration_s,
    )


# Dynamo's documented example: 10 blocks, prefill 8, 5 and 2 of them, 10, 5 and 9 active blocks.
DYNAMO = [
    worker("worker-1", queue_s=10, cached=2),
    worker("worker-2", queue_s=5, cached=5),
    worker("worker-3", queue_s=9, cached=8),
]


def test_costs_equal_those_of_dynamos_example() -> None:
    """18, 10 and 11: worker 2 is chosen, although worker 3 has more of the prompt cached."""
    costs = [cost_s(one, prompt_tokens=10, cached_anywhere_tokens=8) for one in DYNAMO]
    assert costs == [18, 10, 11]
    chosen = choose(DYNAMO, prompt_tokens=10)
    assert chosen is not None
    assert chosen.worker == "worker-2"


def test_tokens_cached_on_another_worker_cost_migration_or_prefill() -> None:
    """The cheaper of the two; tokens without a cached copy cost prefill."""
    cheap = worker("a", cached=10, migration_s=0.1)
    dear = worker("a", cached=10, migration_s=7.0)
    assert cost_s(cheap, prompt_tokens=100, cached_anywhere_tokens=60) == pytest.approx(45)
    assert cost_s(dear, prompt_tokens=100, cached_anywhere_tokens=60) == pytest.approx(90)


def test_worker_with_the_whole_prompt_cached_costs_only_its_queue() -> None:
    """Migration and prefill add nothing, at any price."""
    idle = worker("a", cached=100, prefill_s=math.inf)
    assert cost_s(idle, prompt_tokens=50, cached_anywhere_tokens=100) == 0


def test_cached_prefix_decides_within_the_queue_guard() -> None:
    """A hot prefix goes to a busy worker only within the guard; beyond it, to the idle worker."""
    hot = worker("hot", queue_s=9, cached=100)
    idle = worker("idle", queue_s=1)
    unguarded = choose([hot, idle], prompt_tokens=100)
    guarded = choose([hot, idle], prompt_tokens=100, guard=LoadGuard(ratio=2, slack_s=1))
    assert unguarded is hot
    assert guarded is idle


def test_equal_costs_go_to_the_idlest_worker_then_the_first_name() -> None:
    """The choice does not depend on the order of the candidates."""
    busy = worker("a", queue_s=1, cached=1)
    idle = [worker("c"), worker("b")]
    assert choose([*idle, busy], prompt_tokens=1).worker == "b"  # type: ignore[union-attr]


def test_choice_without_candidates_is_none() -> None:
    """The caller waits."""
    assert choose([], prompt_tokens=5) is None


@given(
    st.lists(
        st.builds(
            lambda queue, cached, rate: (queue, cached, rate),
            st.floats(0, 100),
            st.integers(0, 500),
            st.floats(0.001, 1),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 500),
)
def test_chosen_worker_is_within_the_queue_guard(
    shapes: list[tuple[float, int, float]], prompt_tokens: int
) -> None:
    """For any cache contents; one worker is always chosen."""
    guard = LoadGuard(ratio=2, slack_s=0.5)
    candidates = [
        worker(f"w{n}", queue_s=queue, cached=cached, prefill_s=rate)
        for n, (queue, cached, rate) in enumerate(shapes)
    ]
    chosen = choose(candidates, prompt_tokens=prompt_tokens, guard=guard)
    idlest_s = min(one.queue_delay_s for one in candidates)
    assert chosen is not None
    assert chosen.queue_delay_s <= 2 * idlest_s + 0.5


def test_measured_rate_replaces_the_first_guess() -> None:
    """Observations outweigh the guess at once, and old ones fade."""
    rate = LearnedRate(1.0, memory_units=100)
    rate.observe(seconds=1.0, units=100)
    assert rate.seconds < 0.05
    for _ in range(10):
        rate.observe(seconds=2.0, units=100)
    assert rate.seconds == pytest.approx(0.02, rel=0.01)


def test_measurement_of_no_work_leaves_the_rate_unchanged() -> None:
    """Zero units neither change it nor divide by zero."""
    rate = LearnedRate(0.5, memory_units=100)
    rate.observe(seconds=3.0, units=0)
    assert rate.seconds == 0.5
