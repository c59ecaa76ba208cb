"""On-policy distillation: the teacher's advantages on merged trees, and its effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.rl.config import LearnerConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from tests.support.rl.forests import forest
from tests.support.rl.models import other_model, relative_errors, tiny_model, wide_norms
from tests.support.rl.per_sample import Columns, columns_of, merged_gradient, summed_gradient

COEF, CAP = 0.7, 1.5


def samples() -> list[Sample]:
    return [one for kind in ("compacted", "temperatures", "duplicate") for one in forest(kind)]


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("budget", [1 << 30, 24, 5])
@pytest.mark.parametrize("family", ["other", "llama4"])
def test_teacher_on_merged_trees_equals_one_sample_at_a_time(
    family: str, budget: int, only: bool
) -> None:
    """In fp64 to 1e-12 for a student on merged trees: with a teacher of other sizes, and with one
    that is computed by sequence."""
    with wide_norms():
        model = tiny_model("qwen3", torch.float64)
        teacher = (
            other_model(torch.float64)
            if family == "other"
            else tiny_model(family, torch.float64).requires_grad_(False)
        )
        batch = samples()
        tokens = sum(one.trained_tokens for one in batch)
        taught = {id(one): columns_of(teacher, [one]).logprobs for one in batch}
        current: list[Sample] = []

        def loss(one: Columns) -> Tensor:
            own = one.logprobs.detach()
            earned = torch.zeros_like(own) if only else one.advantages
            advantages = earned + COEF * (taught[id(current.pop(0))] - own)
            weights = (own - one.behavior).exp().clamp(max=CAP)
            return -(weights * advantages * one.logprobs).sum() / tokens

        current.extend(batch)
        expected = summed_gradient(model, [[one] for one in batch], loss)
        objective = ObjectiveConfig(ratio_cap=CAP, teacher_coef=COEF, teacher_only=only)
        config = LearnerConfig(objective=objective, token_budget=budget)
        learner = Learner(TreePolicy(model), config, teacher=TreePolicy(teacher))
        errors = relative_errors(merged_gradient(learner, learner.plan(batch)), expected)
    # The norms of mamba compute in fp32.
    assert max(errors) <= (1e-12 if family == "other" else 1e-7)


def distilled(**objective: Any) -> list[float]:
    """The KL to the teacher before each of a few steps."""
    settings = {"teacher_coef": 1.0, "teacher_only": True, "algorithm": "reinforce", **objective}
    config = LearnerConfig(
        optimizer=OptimizerConfig(learning_rate=3e-3), objective=ObjectiveConfig(**settings)
    )
    teacher = TreePolicy(other_model(torch.float32))
    one = Learner(TreePolicy(tiny_model("qwen3", torch.float32)), config, teacher=teacher)
    plan = one.plan(samples())
    return [one.step(plan, weight_version=1).stats.teacher_kl for _ in range(4)]


def test_policy_moves_towards_its_teacher() -> None:
    """The estimated KL falls from step to step, and `teacher_kl` is its value."""
    found = distilled()
    assert found == sorted(found, reverse=True) and found[-1] < found[0] - 0.1
    batch = samples()
    with torch.no_grad():
        own = columns_of(tiny_model("qwen3", torch.float32), batch).logprobs
        taught = columns_of(other_model(torch.float32), batch).logprobs
    assert found[0] == pytest.approx(float((own - taught).mean()), rel=1e-4)


def test_teacher_needs_no_rewards() -> None:
    """With rewards besides, their advantages are part of the gradient."""
    assert distilled()[1:] != distilled(teacher_only=False)[1:]


def test_distillation_without_a_teacher_is_refused() -> None:
    """With the setting's name."""
    config = LearnerConfig(objective=ObjectiveConfig(teacher_coef=0.5))
    with pytest.raises(InvalidArgument, match=r"teacher_coef = 0\.5 .*no teacher"):
        Learner(TreePolicy(tiny_model("qwen3", torch.float32)), config)
