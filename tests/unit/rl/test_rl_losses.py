"""CISPO and its statistics, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.rl.losses import TokenStats, cispo_loss, policy_stats


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_the_loss_is_the_capped_ratio_times_advantage_times_log_prob() -> None:
    """Ratios 2, 1/2 and 8 under a cap of 5: weights 2, 1/2 and 5."""
    logprobs = logs(0.4, 0.2, 0.8)
    behavior = logs(0.2, 0.4, 0.1)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = -(2 * 1.0 * math.log(0.4) + 0.5 * -2.0 * math.log(0.2) + 5 * 0.5 * math.log(0.8))
    loss = cispo_loss(logprobs, behavior, advantages, ratio_cap=5.0)
    assert float(loss) == pytest.approx(expected)


def test_the_ratio_carries_no_gradient_and_no_token_loses_its_own() -> None:
    """d loss / d log pi = -min(r, cap) * A: the capped token still learns."""
    logprobs = logs(0.4, 0.8).requires_grad_()
    advantages = torch.tensor([1.0, 1.0], dtype=torch.float64)
    cispo_loss(logprobs, logs(0.2, 0.1), advantages, ratio_cap=5.0).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -5.0])


def test_a_ratio_beyond_floating_point_is_the_cap() -> None:
    """exp overflows to infinity, which the cap turns into a number again."""
    loss = cispo_loss(
        torch.tensor([-1.0]), torch.tensor([-1000.0]), torch.tensor([1.0]), ratio_cap=5.0
    )
    assert float(loss) == 5.0


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20))
def test_on_policy_it_is_reinforce(values: list[float]) -> None:
    """Where nothing has moved, every weight is 1."""
    logprobs = torch.tensor(values, dtype=torch.float64)
    advantages = torch.linspace(-1, 1, len(values), dtype=torch.float64)
    loss = cispo_loss(logprobs, logprobs, advantages, ratio_cap=5.0)
    assert float(loss) == pytest.approx(float(-(advantages * logprobs).sum()))


def test_statistics_are_over_all_tokens_of_all_trees() -> None:
    """Two trees of one and three tokens weigh by token."""
    one = TokenStats(
        logprobs=logs(0.8),
        behavior=logs(0.1),
        entropy=torch.tensor([2.0]),
        versions=torch.tensor([4]),
    )
    three = TokenStats(
        logprobs=logs(0.5, 0.5, 0.5),
        behavior=logs(0.5, 0.5, 0.25),
        entropy=torch.tensor([1.0, 1.0, 0.0]),
        versions=torch.tensor([7, 7, 6]),
    )
    stats = policy_stats([one, three], ratio_cap=5.0, weight_version=7)
    assert stats.clip_fraction == 0.25
    assert stats.entropy == 1.0
    assert stats.logprob_gap_mean == pytest.approx((math.log(8) + math.log(2)) / 4, rel=1e-6)
    assert stats.logprob_gap_p99 == pytest.approx(math.log(8), rel=1e-6)
    assert (stats.staleness_mean, stats.staleness_max) == (1.0, 3.0)


def test_no_tokens_have_no_statistics() -> None:
    """A batch of nothing reports zeros, not NaN."""
    stats = policy_stats([], ratio_cap=5.0, weight_version=7)
    assert stats.entropy == stats.logprob_gap_p99 == stats.staleness_max == 0.0
