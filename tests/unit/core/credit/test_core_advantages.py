"""Baselines, spreads and domain weights, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.credit.advantages import (
    AdvantageRules,
    GroupAdvantages,
    GroupReturns,
    Spread,
    batch_advantages,
)
from forge.core.credit.rewards import returns_to_go

GROUP = [[1.0, 1.0], [0.0], [2.0, 0.5]]


def of_group(returns: list[list[float]], **rules: Any) -> GroupAdvantages:
    (one,) = batch_advantages([GroupReturns(returns=returns)], AdvantageRules(**rules))
    return one


def of_batch(groups: list[tuple[str, list[float]]], **rules: Any) -> list[list[float]]:
    """Groups of one-turn rollouts, by domain."""
    batch = [
        GroupReturns(returns=[[total] for total in totals], domain=name) for name, totals in groups
    ]
    found = batch_advantages(batch, AdvantageRules(**rules))
    return [[advantage for (advantage,) in group.advantages] for group in found]


def test_the_group_mean_of_total_returns_is_subtracted() -> None:
    """B is the mean of the G_i0, for every turn."""
    result = of_group(GROUP, baseline="group_mean")
    assert result.advantages == [[0.0, 0.0], [-1.0], [1.0, -0.5]]
    assert not result.flat


def test_leave_one_out_compares_with_the_others() -> None:
    """B_i is the mean over the other rollouts' totals."""
    assert of_group(GROUP, baseline="leave_one_out").advantages == [[0.0, 0.0], [-1.5], [1.5, 0.0]]


def test_no_baseline_leaves_returns_as_they_are() -> None:
    """REINFORCE without a baseline."""
    assert of_group(GROUP, baseline="none").advantages == GROUP


def test_advantage_is_return_to_go_minus_the_group_mean() -> None:
    """Rewards (1, 0, 2) discounted by half: G = (1.5, 1, 2); the other rollout has 0.5."""
    returns = [returns_to_go([1.0, 0.0, 2.0], gamma=0.5), [0.5]]
    assert returns[0] == [1.5, 1.0, 2.0]
    assert of_group(returns).advantages == [[0.5, 0.0, 1.0], [-0.5]]


def test_batch_baseline_is_the_mean_over_all_groups() -> None:
    """Totals 0, 2, 4, 6 have mean 3 for any division into groups."""
    groups = [("a", [0.0, 2.0]), ("b", [4.0, 6.0])]
    assert of_batch(groups, baseline="batch_mean") == [[-3.0, -1.0], [1.0, 3.0]]


def test_returns_are_divided_by_the_spread_of_their_group() -> None:
    """Totals 0 and 2 have mean 1 and standard deviation 1; 0 and 4 scale to the same."""
    for top in (2.0, 4.0):
        assert of_group([[0.0], [top]], spread="group").advantages == [[-1.0], [1.0]]


def test_batch_spread_is_computed_from_centered_totals() -> None:
    """Centered totals -1, 1, -3, 3: standard deviation sqrt 5, for every group."""
    found = of_batch([("a", [0.0, 2.0]), ("b", [100.0, 106.0])], spread="batch")
    root = math.sqrt(5)
    assert found == [pytest.approx([-1 / root, 1 / root]), pytest.approx([-3 / root, 3 / root])]


def test_reinforce_plus_plus_whitens_the_batch() -> None:
    """Mean 3 and standard deviation sqrt 5 of 0, 2, 4, 6."""
    found = of_batch([("a", [0.0, 2.0]), ("b", [4.0, 6.0])], baseline="batch_mean", spread="batch")
    assert [value for group in found for value in group] == pytest.approx(
        [value / math.sqrt(5) for value in (-3, -1, 1, 3)]
    )


def test_domain_spread_covers_the_groups_of_one_domain() -> None:
    """Two groups of `a` share sqrt 5; the one of `b` has 10."""
    found = of_batch([("a", [0.0, 2.0]), ("a", [0.0, 6.0]), ("b", [0.0, 20.0])], spread="domain")
    root = math.sqrt(5)
    assert found[0] == pytest.approx([-1 / root, 1 / root])
    assert found[1] == pytest.approx([-3 / root, 3 / root])
    assert found[2] == [-1.0, 1.0]


def test_domain_weights_scale_their_domain_alone() -> None:
    """A domain without a weight weighs 1; weight 0 leaves the policy of a domain unchanged."""
    found = of_batch(
        [("a", [0.0, 2.0]), ("b", [0.0, 2.0]), ("c", [0.0, 2.0])],
        domain_weights={"a": 0.5, "c": 0.0},
    )
    assert found == [[-0.5, 0.5], [-1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("spread", ["none", "group", "batch", "domain"])
def test_flat_group_has_zero_advantages(baseline: str, spread: str) -> None:
    """Equal rewards give zero advantage, without a division by zero."""
    result = of_group([[0.1]] * 3, baseline=baseline, spread=spread)
    assert result.flat
    assert result.advantages == [[pytest.approx(0.0, abs=1e-12)]] * 3


@pytest.mark.parametrize("spread", ["group", "batch", "domain"])
def test_spread_below_the_floor_is_replaced_by_the_floor(spread: str) -> None:
    """Totals 0 and 0.002 have a spread of 0.001; over a floor of 0.01 they are a tenth from 0."""
    returns = [[0.0], [0.002]]
    small = of_group(returns, spread=spread, spread_floor=0.01)
    assert [one for (one,) in small.advantages] == pytest.approx([-0.1, 0.1])
    assert not small.flat
    whole = of_group(returns, spread=spread, spread_floor=0.001)
    assert [one for (one,) in whole.advantages] == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("spread", ["none", "group", "batch", "domain"])
def test_speed_reward_is_added_after_division_by_the_spread(spread: Spread) -> None:
    """The speed reward changes neither baseline nor spread nor flatness, and is scaled by the
    domain's weight."""
    for returns in ([[1.0], [1.0]], [[0.0], [4.0]]):
        rules = AdvantageRules(spread=spread, domain_weights={"a": 2.0})
        groups = [
            GroupReturns(returns=returns, speed=speed, domain="a")
            for speed in ((), [[0.25], [-0.25]])
        ]
        (without,), (found,) = (batch_advantages([group], rules) for group in groups)
        added = [a - b for (a,), (b,) in zip(found.advantages, without.advantages, strict=True)]
        assert added == pytest.approx([0.5, -0.5])
        assert found.flat == without.flat


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "batch_mean"])
def test_single_rollout_is_its_own_baseline(baseline: str) -> None:
    """A group of one rollout has an advantage of zero."""
    assert of_group([[3.0]], baseline=baseline).advantages == [[0.0]]


@pytest.mark.parametrize("baseline", ["group_mean", "batch_mean"])
def test_rollout_without_turns_is_left_out(baseline: str) -> None:
    """It has no advantages and does not shift the baseline."""
    assert of_group([[], [1.0], [3.0]], baseline=baseline).advantages == [[], [-1.0], [1.0]]
    assert of_group([[]], baseline=baseline, spread="batch").advantages == [[]]


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_leave_one_out_is_the_group_mean_rescaled(totals: list[float]) -> None:
    """A_loo = n/(n-1) * A_mean: the same direction, unbiased."""
    returns = [[total] for total in totals]
    mean = of_group(returns, baseline="group_mean").advantages
    loo = of_group(returns, baseline="leave_one_out").advantages
    n = len(totals)
    for (one,), (other,) in zip(mean, loo, strict=True):
        assert other == pytest.approx(one * n / (n - 1), abs=1e-9)
