"""Group baselines, against values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.advantages import group_advantages

GROUP = [[1.0, 1.0], [0.0], [2.0, 0.5]]


def test_the_group_mean_of_total_returns_is_subtracted() -> None:
    """B is the mean of the G_i0, for every turn."""
    result = group_advantages(GROUP, baseline="group_mean", normalize_std=False)
    assert result.advantages == [[0.0, 0.0], [-1.0], [1.0, -0.5]]
    assert not result.flat


def test_leave_one_out_compares_with_the_others() -> None:
    """B_i is the mean over the other rollouts' totals."""
    result = group_advantages(GROUP, baseline="leave_one_out", normalize_std=False)
    assert result.advantages == [[0.0, 0.0], [-1.5], [1.5, 0.0]]


def test_no_baseline_leaves_returns_as_they_are() -> None:
    """REINFORCE without a baseline."""
    result = group_advantages(GROUP, baseline="none", normalize_std=False)
    assert result.advantages == GROUP


def test_normalising_divides_by_the_spread_of_the_group() -> None:
    """Totals 0 and 2 have mean 1 and standard deviation 1; 0 and 4 scale to the same."""
    for top in (2.0, 4.0):
        result = group_advantages([[0.0], [top]], baseline="group_mean", normalize_std=True)
        assert result.advantages == [[-1.0], [1.0]]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_an_all_equal_group_is_flat_and_teaches_nothing(baseline, normalize_std) -> None:  # type: ignore[no-untyped-def]
    """Equal rewards give zero advantage, without a division by zero."""
    result = group_advantages([[0.1]] * 3, baseline=baseline, normalize_std=normalize_std)
    assert result.flat
    assert result.advantages == [[pytest.approx(0.0, abs=1e-12)]] * 3


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_rollout_without_others_is_its_own_baseline(baseline) -> None:  # type: ignore[no-untyped-def]
    """A group of one has nothing to compare with, so it moves nothing."""
    assert group_advantages([[3.0]], baseline=baseline, normalize_std=False).advantages == [[0.0]]


def test_a_rollout_without_turns_takes_no_part() -> None:
    """It neither has advantages nor shifts the baseline."""
    result = group_advantages([[], [1.0], [3.0]], baseline="group_mean", normalize_std=False)
    assert result.advantages == [[], [-1.0], [1.0]]
    assert group_advantages([[]], baseline="group_mean", normalize_std=False).advantages == [[]]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_leave_one_out_is_the_group_mean_rescaled(totals: list[float]) -> None:
    """A_loo = n/(n-1) * A_mean: the same direction, unbiased."""
    returns_GT = [[total] for total in totals]
    mean = group_advantages(returns_GT, baseline="group_mean", normalize_std=False).advantages
    loo = group_advantages(returns_GT, baseline="leave_one_out", normalize_std=False).advantages
    n = len(totals)
    for (one,), (other,) in zip(mean, loo, strict=True):
        assert other == pytest.approx(one * n / (n - 1), abs=1e-9)
