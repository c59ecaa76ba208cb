"""Confidence intervals over tasks: how often they hold the truth, and what moves them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.confidence_intervals import _student_t, change_interval, mean_interval

RUNS = 400
LEAST = 0.92
"""95 % less three standard errors of a share over so many runs."""


def task_outcome(rng: Random, rate: float, attempts: int) -> float:
    """Tasks differ in difficulty: a task's own rate is spread around that of its domain."""
    own = rng.betavariate(2 * rate, 2 * (1 - rate))
    return sum(rng.random() < own for _ in range(attempts)) / attempts


@pytest.mark.parametrize("attempts", [1, 4])
@pytest.mark.parametrize("tasks", [8, 24])
@pytest.mark.parametrize(
    ("before", "after"),
    [([0.3], [0.3]), ([0.25], [0.9]), ([0.02], [0.02]), ([0.1, 0.4, 0.2], [0.3, 0.9, 0.2])],
)
def test_the_interval_of_a_change_holds_the_truth_19_times_of_20(
    before: list[float], after: list[float], tasks: int, attempts: int
) -> None:
    """Whether rates are equal, far apart or near 0, in one domain or several of them, with several
    attempts at each task or one."""
    rng = Random(f"{before}{after}{tasks}{attempts}")
    truth = sum(after) / len(after) - sum(before) / len(before)
    held = 0
    for _ in range(RUNS):
        changes = [
            [task_outcome(rng, a, attempts) - task_outcome(rng, b, attempts) for _ in range(tasks)]
            for b, a in zip(before, after, strict=True)
        ]
        found = change_interval(changes)
        assert found is not None
        held += found.low <= truth <= found.high
    assert held / RUNS >= LEAST


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.95])
def test_the_interval_of_a_mean_holds_the_truth_19_times_of_20(rate: float) -> None:
    """Also where hardly a task is solved, and where nearly all are."""
    rng = Random(f"{rate}")
    held = 0
    for _ in range(RUNS):
        found = mean_interval([[task_outcome(rng, rate, 2) for _ in range(24)]])
        assert found is not None
        held += found.low <= rate <= found.high
    assert held / RUNS >= LEAST


def test_attempts_at_one_task_count_once() -> None:
    """Ten equal attempts at each of eight tasks give as much information as eight values."""
    values = [0.0, 1.0] * 4
    eight, eighty = mean_interval([values]), mean_interval([values * 10])
    assert eight is not None and eighty is not None
    assert eight.high - eight.low > 2 * (eighty.high - eighty.low)


def test_interval_of_equal_values_has_a_width() -> None:
    """24 tasks that all failed twice leave an interval around 0, narrower with more tasks."""
    few, many = change_interval([[0.0] * 24]), change_interval([[0.0] * 240])
    assert few is not None and many is not None
    assert few.low < many.low < 0 < many.high < few.high
    none_solved = mean_interval([[0.0] * 24])
    assert none_solved is not None and none_solved.low == 0 and 0.05 < none_solved.high < 0.2


@given(st.lists(st.lists(st.floats(-1, 1), max_size=20), max_size=5))
def test_interval_is_around_the_mean_and_within_the_scale(strata: list[list[float]]) -> None:
    """For any strata, also empty ones; without a stratum there is no interval."""
    values = [value for stratum in strata for value in stratum]
    found = change_interval(strata)
    if not values:
        assert found is None and mean_interval(strata) is None
        return
    assert found is not None
    assert -1 <= found.low < found.high <= 1
    assert found.low - 1e-9 <= sum(values) / len(values) <= found.high + 1e-9


def test_outcomes_outside_the_scale_widen_the_interval() -> None:
    """Outcomes of a custom domain may be any number."""
    found = mean_interval([[0.0, 10.0] * 12])
    assert found is not None and 1 < found.low < 5 < found.high < 9


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 4.303), (5, 2.571), (24, 2.064), (1e9, 1.96)]
)
def test_students_quantile_equals_the_tables(freedom: float, quantile: float) -> None:
    """Within one percent from two degrees of freedom on."""
    assert _student_t(freedom) == pytest.approx(quantile, rel=0.01)
