"""The composite reward, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.credit.rewards import (
    RewardComponent,
    RewardWeights,
    check_value,
    returns_to_go,
    speed_credits,
    speed_reward,
    turn_rewards,
)
from forge.core.errors import InvalidArgument

seconds = st.floats(0, 1e6)


def test_completion_at_the_baseline_has_speed_reward_one_half() -> None:
    """h(0) = 1, h(1) = 1/2, h(3) = 1/4."""
    assert [speed_reward(t, 2.0) for t in (0.0, 2.0, 6.0)] == [1.0, 0.5, 0.25]


@given(seconds, seconds, st.floats(1e-3, 1e6))
def test_slower_rollout_never_has_a_higher_speed_reward(
    one: float, other: float, baseline: float
) -> None:
    """The speed reward is in [0, 1] and falls with completion time."""
    fast, slow = sorted((one, other))
    assert 0 <= speed_reward(slow, baseline) <= speed_reward(fast, baseline) <= 1


@pytest.mark.parametrize(
    ("completion_s", "baseline_s"), [(-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)]
)
def test_speed_reward_refuses_invalid_times(completion_s: float, baseline_s: float) -> None:
    """A negative, infinite or missing time is an error, not a reward."""
    with pytest.raises(InvalidArgument):
        speed_reward(completion_s, baseline_s)


def test_reward_components_are_summed_per_turn() -> None:
    """r_t = alpha*process + outcome; turn -1 credits the last turn; speed is not included."""
    rewards_T = turn_rewards(
        [
            RewardComponent(kind="process", value=-1.0, turn_index=0),
            RewardComponent(kind="process", value=0.5, turn_index=2),
            RewardComponent(kind="speed", value=0.5, turn_index=-1),
            RewardComponent(kind="outcome", value=1.0, turn_index=-1),
        ],
        turns=3,
        weights=RewardWeights(alpha=0.2, beta=0.1),
    )
    assert rewards_T == pytest.approx([-0.2, 0.0, 0.1 + 1.0])


def test_speed_reward_counts_whole_steps_from_the_group_mean() -> None:
    """Mean 0.5, steps of 0.1: +0.24 counts as 0.2 and -0.12 as 0.1, each times beta."""
    weights = RewardWeights(beta=0.5, speed_step=0.1)
    found = speed_credits([0.74, 0.38, 0.5, 0.38, None], weights)
    assert found == pytest.approx([0.1, -0.05, 0.0, -0.05, 0.0])


def test_single_known_speed_in_a_group_adds_no_reward() -> None:
    """Also in a group of one rollout."""
    assert speed_credits([0.9], RewardWeights()) == [0.0]
    assert speed_credits([None, 0.9, None], RewardWeights()) == [0.0] * 3


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_speed_reward_is_at_most_beta(speeds: list[float]) -> None:
    """It is zero if all rollouts are within one step; a faster rollout never gets less."""
    weights = RewardWeights(beta=0.1, speed_step=0.05)
    found = speed_credits(speeds, weights)
    assert all(abs(one) <= 0.1 for one in found)
    if max(speeds) - min(speeds) < 0.05:
        assert found == [0.0] * len(speeds)
    assert [found[i] for i in sorted(range(len(speeds)), key=speeds.__getitem__)] == sorted(found)


@pytest.mark.parametrize("turn_index", [3, -2])
def test_reward_for_a_missing_turn_is_refused(turn_index: int) -> None:
    """The error names the turn."""
    component = RewardComponent(kind="outcome", value=1.0, turn_index=turn_index)
    with pytest.raises(InvalidArgument, match=str(turn_index)):
        turn_rewards([component], turns=3, weights=RewardWeights())


def test_an_infinite_reward_is_refused() -> None:
    """One infinite reward would make every advantage of its group NaN."""
    component = RewardComponent(kind="outcome", value=math.inf, turn_index=0)
    with pytest.raises(InvalidArgument, match="inf"):
        turn_rewards([component], turns=1, weights=RewardWeights())


def test_returns_discount_later_rewards() -> None:
    """G = (1 + .5*(2 + .5*4), 2 + .5*4, 4)."""
    assert returns_to_go([1.0, 2.0, 4.0], gamma=0.5) == [3.0, 4.0, 4.0]
    assert returns_to_go([], gamma=0.5) == []


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20))
def test_without_discount_the_first_return_is_the_sum(rewards_T: list[float]) -> None:
    """G_0 at gamma 1 is the total reward."""
    assert returns_to_go(rewards_T, gamma=1.0)[0] == pytest.approx(math.fsum(rewards_T), abs=1e-9)


def test_trajectory_with_two_outcomes_has_none() -> None:
    """An earlier version may have stored two, one perhaps from the agent itself: none is
    trusted."""
    two = [RewardComponent(kind="outcome", value=value, turn_index=-1) for value in (0.0, 1000.0)]
    with pytest.raises(InvalidArgument, match=r"2 outcomes .*1000"):
        turn_rewards(two, turns=1, weights=RewardWeights())


def test_agent_rewards_count_only_with_their_own_weight() -> None:
    """They are no process rewards, and their sum is at most their weight."""
    reports = [
        RewardComponent(kind="agent", value=1.0, turn_index=0),
        RewardComponent(kind="agent", value=-1.0, turn_index=1),
        RewardComponent(kind="agent", value=0.5, turn_index=1),
        RewardComponent(kind="outcome", value=1.0, turn_index=-1),
    ]
    assert turn_rewards(reports, turns=2, weights=RewardWeights(alpha=1.0)) == [0.0, 1.0]
    counted = turn_rewards(reports, turns=2, weights=RewardWeights(agent=0.5))
    assert counted == pytest.approx([0.5 / 2.5, 1.0 - 0.5 * 0.5 / 2.5])
    assert turn_rewards(reports[2:], turns=2, weights=RewardWeights(agent=0.5)) == [0.0, 1.25]


@given(st.lists(st.floats(-1, 1), max_size=20), st.floats(0, 1))
def test_agent_rewards_never_exceed_their_weight(values: list[float], weight: float) -> None:
    """For any number of reports."""
    reports = [RewardComponent(kind="agent", value=value, turn_index=0) for value in values]
    (total,) = turn_rewards(reports, turns=1, weights=RewardWeights(agent=weight))
    assert abs(total) <= weight * (1 + 1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0001e6])
def test_reward_above_the_largest_magnitude_is_refused(value: float) -> None:
    """The largest magnitude is 1e6; the error names the reward."""
    with pytest.raises(InvalidArgument, match=f"'solved' has value {value}".replace("+", r"\+")):
        check_value("solved", value)
    check_value("solved", -1e6)
