"""Random trees: no shape, no split and no relay changes loss or gradient.

In fp64, against the model's own code and stock attention, one sample at a time. CISPO's loss is a
sum over samples, so the gradient of each sample is computed once so, and what a forest must give
is their sum. The balance loss of experts is no such sum: it is added forest by forest, for fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.core.prefix_tree import Sample
from forge.rl.attention import schedule
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from tests.support.rl.models import (
    CAP,
    Gradient,
    gradients,
    make_sample,
    reference_gradient,
    relative_errors,
    tiny_model,
    wide_norms,
    with_balance,
)

pytestmark = pytest.mark.matrix

FUZZ = settings.get_current_profile_name() == "fuzz"
"""`make properties` computes a hundred times as many or more."""
TREES = 10_000 if FUZZ else 70
FORESTS = 3_200 if FUZZ else 28
"""Of some three to four trees each."""
EXPERT_FORESTS = 150 if FUZZ else 6
SAMPLES = 200 if FUZZ else 60
"""Of which forests are drawn; over three tokens, so that they share prefixes of every length."""
ROOTS, LONGEST = 8, 10
UNSPLIT = 1 << 30
# What takes longest comes up less often.
FAMILIES = (
    "qwen3",
    "qwen3",
    "qwen3",
    "gemma3",
    *(["falcon_h1", "qwen3_next", "mamba"] if FUZZ else []),
)
EXPERTS = "qwen3_moe"
LIMIT_S = 5400 if FUZZ else 900
"""A random round took more than 15 minutes beside other work."""
BALANCE = 0.1
BUDGETS = (UNSPLIT, UNSPLIT, UNSPLIT, 12, 12, 3, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A model, and what each sample by itself does to it."""

    learner: Learner
    stock: Any
    """The same model, with its own attention."""
    apart: list[Gradient]


@cache
def samples() -> list[Sample]:
    rng = Random(0)
    made = []
    for number in range(SAMPLES):
        ids = [rng.randrange(ROOTS), *(rng.randrange(3) for _ in range(1 + number % (LONGEST - 1)))]
        start = rng.randrange(1, len(ids))
        made.append(make_sample(ids, (start, rng.randrange(start, len(ids)) + 1), rng=rng))
    return made


@cache
def known(family: str) -> Known:
    model, stock = tiny_model(family, torch.float64), tiny_model(family, torch.float64)
    apart = [reference_gradient(stock, [one]) for one in samples()]
    config = LearnerConfig(objective=ObjectiveConfig(ratio_cap=CAP))
    policy = TreePolicy(model, balance_coef=BALANCE if family == EXPERTS else 0.0)
    return Known(learner=Learner(policy, config), stock=stock, apart=apart)


def together(family: str, drawn: Sequence[int]) -> Gradient:
    """The token mean over those samples, from the means over each."""
    apart = [known(family).apart[index] for index in drawn]
    tokens_N = torch.tensor([samples()[index].trained_tokens for index in drawn]).double()
    weights_N = tokens_N / tokens_N.sum()

    def mean(values: Sequence[float]) -> float:
        return float(weights_N @ torch.tensor(values, dtype=torch.float64))

    def sum_of(name: str) -> Tensor:
        stacked = torch.stack([one.of[name] for one in apart])
        return torch.einsum("n,n...->...", weights_N, stacked)

    policy = Gradient(
        loss=mean([one.loss for one in apart]),
        of={name: sum_of(name) for name in apart[0].of},
        loss_scale=mean([one.loss_scale for one in apart]),
        scale={name: mean([one.scale[name] for one in apart]) for name in apart[0].scale},
    )
    if family != EXPERTS:
        return policy
    return with_balance(policy, known(family).stock, [samples()[index] for index in drawn], BALANCE)


DRAWN = st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=12)
CALL_FLOPS = st.sampled_from([0.0, 6e6])


def errors(
    family: str, drawn: Sequence[int], budget: int, call_flops: float
) -> tuple[float, float]:
    """Relative, of loss and gradients."""
    with wide_norms(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "CALL_FLOPS", call_flops)
        learner = known(family).learner
        model, balance = learner.policy.model, learner.policy.balance
        learner.budget.tokens = budget
        model.zero_grad()
        loss, _ = learner.accumulate(learner.plan([samples()[index] for index in drawn]))
        if balance is not None:
            loss += balance.value
        found = Gradient(loss=loss, of=gradients(model))
        return relative_errors(found, together(family, drawn))


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.hypothesis
def test_random_forests_of_dense_models_are_exact() -> None:
    """Loss and every gradient agree to 1e-12: with and without a sliding window, whole, split and
    relayed, as blocks and as slabs, with repeated samples."""
    trees = 0

    @settings(max_examples=FORESTS, deadline=None, database=None)
    @given(DRAWN, st.sampled_from(FAMILIES), st.sampled_from(BUDGETS), CALL_FLOPS)
    def is_exact(drawn: list[int], family: str, budget: int, call_flops: float) -> None:
        nonlocal trees
        trees += len({samples()[index].ids[0] for index in drawn})
        assert max(errors(family, drawn, budget, call_flops)) <= 1e-12

    is_exact()
    assert trees >= TREES


@pytest.mark.timeout(LIMIT_S)
@settings(max_examples=EXPERT_FORESTS, deadline=None, database=None)
@given(DRAWN, st.sampled_from(BUDGETS), CALL_FLOPS)
def test_random_forests_of_mixtures_of_experts_are_exact(
    drawn: list[int], budget: int, call_flops: float
) -> None:
    """Loss, load balance included, and every gradient agree to 1e-12."""
    assert max(errors(EXPERTS, drawn, budget, call_flops)) <= 1e-12
