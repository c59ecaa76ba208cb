"""Ratios and means over whole trajectories, and the entropy bonus, on merged trees (invariant I5).

The reference writes each down for one trajectory at a time, over the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.learner.learner import Learner
from forge.rl.losses.objective import Objective
from forge.rl.model.policy import TreePolicy
from tests.support.rl.models import make_sample, relative_errors, tiny_model, wide_norms
from tests.support.rl.per_sample import Columns, merged_gradient, nearby, summed_gradient

LOW, HIGH, LENGTH, COEF, CAP = 0.05, 0.1, 7, 0.3, 1.2
UNSPLIT, SPLIT, RELAYED = 1 << 30, 24, 5
TRAJECTORIES = 4


def trajectories() -> list[list[Sample]]:
    """Three trajectories of one group, of which two begin with the same answer, and one of another
    prompt. Each has several turns, a different advantage, and a summary breaks one."""
    rng = Random(3)

    def ids(count: int) -> list[int]:
        return [rng.randrange(13) for _ in range(count)]

    prompt, other, same, tool = ids(6), ids(5), ids(3), ids(2)
    made = []
    for number in range(TRAJECTORIES):
        context = list(other if number == 3 else prompt)
        samples = []
        for turn in range(3):
            answer = same if turn == 0 and number < 2 else ids(1 + rng.randrange(4))
            if turn == 2 and number == 1:
                context = prompt[:3] + ids(2)
            whole = [*context, *answer]
            one = make_sample(whole, (len(context), len(whole)), rng=rng)
            advantage = float32_bytes([(-1.0) ** number * (0.5 + number)] * len(answer))
            samples.append(replace(one, advantages=advantage, trajectory=10 - number))
            context = [*whole, *tool]
        made.append(samples)
    return made


def surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)


def gspo(one: Columns) -> Tensor:
    """The sequence form: one ratio, one advantage."""
    return surrogate((one.logprobs - one.behavior).mean().exp(), one.advantages[0]) / TRAJECTORIES


def rloo(one: Columns) -> Tensor:
    return surrogate((one.logprobs - one.behavior).sum().exp(), one.advantages[0]) / TRAJECTORIES


def cispo(one: Columns) -> Tensor:
    weights = (one.logprobs.detach() - one.behavior).exp().clamp(max=CAP)
    return -(weights * one.advantages * one.logprobs).mean() / TRAJECTORIES


def clipped(one: Columns) -> Tensor:
    losses = surrogate((one.logprobs - one.behavior).exp(), one.advantages)
    return losses.sum() / (TRAJECTORIES * LENGTH)


def with_entropy(one: Columns) -> Tensor:
    return cispo(one) - COEF * one.entropy.mean() / TRAJECTORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An objective, and its loss of one trajectory."""

    loss: Callable[[Columns], Tensor]
    settings: Mapping[str, Any]


BOUNDS = {"clip_low": LOW, "clip_high": HIGH}
CASES = {
    "gspo": Case(loss=gspo, settings={"algorithm": "gspo", "ratio_level": "trajectory", **BOUNDS}),
    "rloo": Case(loss=rloo, settings={"algorithm": "rloo", "ratio_level": "trajectory", **BOUNDS}),
    "cispo": Case(loss=cispo, settings={"normalization": "trajectory", "ratio_cap": CAP}),
    "dr_grpo": Case(
        loss=clipped,
        settings={
            "algorithm": "dr_grpo",
            "normalization": "trajectory_global",
            "normalization_tokens": LENGTH,
            **BOUNDS,
        },
    ),
    "entropy": Case(
        loss=with_entropy,
        settings={"normalization": "trajectory", "ratio_cap": CAP, "entropy_coef": COEF},
    ),
}
CUT = {("qwen3", UNSPLIT), ("qwen3", SPLIT), ("qwen3", RELAYED)}
FAMILIES = {
    ("gemma3", RELAYED),
    ("qwen3_moe", SPLIT),
    ("qwen3_next", UNSPLIT),
    ("mamba", SPLIT),
    ("llama4", SPLIT),
}
NARROW = ("qwen3_next", "mamba", "llama4")
"""Families whose norms compute in fp32 for any type of the model."""
GRID = [
    *((name, *way) for name in CASES for way in sorted(CUT)),
    *((name, *way) for name in ("gspo", "entropy") for way in sorted(FAMILIES)),
]


@pytest.mark.parametrize(("name", "family", "budget"), GRID)
def test_merged_gradient_equals_that_of_one_trajectory_at_a_time(
    name: str, family: str, budget: int
) -> None:
    """In fp64 to 1e-12, in one tree, in several that divide a trajectory, relayed, and by
    sequence."""
    case = CASES[name]
    with wide_norms():
        model = tiny_model(family, torch.float64)
        flat = nearby(model, [one for each in trajectories() for one in each])
        units = [[one for one in flat if one.trajectory == 10 - n] for n in range(TRAJECTORIES)]
        expected = summed_gradient(model, units, case.loss)
        objective = ObjectiveConfig(**case.settings)
        config = LearnerConfig(objective=objective, token_budget=budget)
        learner = Learner(TreePolicy(model), config)
        channels, relay = learner.policy.channels, budget != SPLIT
        plan = plan_batch(flat, token_budget=budget, channels=channels, relay=relay)
        assert plan.size.trajectories == TRAJECTORIES
        if budget == SPLIT:
            assert plan.divides_trajectories
        if budget == RELAYED:
            assert any(len(tree.parts) > 1 for tree in plan.trees)
        errors = relative_errors(merged_gradient(learner, plan), expected)
    assert max(errors) <= (1e-6 if family in NARROW else 1e-12)


def test_shared_token_has_the_ratio_of_each_trajectory() -> None:
    """Two trajectories with the same first answer: one log-prob, and two different weights even
    with equal advantages."""
    flat = [
        replace(one, advantages=float32_bytes([1.0] * one.trained_tokens))
        for each in trajectories()[:2]
        for one in each
    ]
    objective = ObjectiveConfig(
        algorithm="gspo", ratio_level="trajectory", normalization="token", clip_high=1e9
    )
    learner = Learner(
        TreePolicy(tiny_model("qwen3", torch.float64)), LearnerConfig(objective=objective)
    )
    plan = learner.plan(flat)
    (tree,) = plan.trees
    _, (stats,) = learner.accumulate(plan)
    shared = tree.edges_T.bincount().argmax()
    places = (tree.edges_T == shared).nonzero()[:, 0]
    first, second = stats.gradient_size[places].tolist()
    assert stats.logprobs[places[0]] == stats.logprobs[places[1]]
    assert abs(first / second - 1) > 0.01


def test_entropy_bonus_raises_the_entropy() -> None:
    """Steps without advantages move towards the uniform distribution."""
    model = tiny_model("qwen3", torch.float32)
    flat = [
        replace(one, advantages=float32_bytes([0.0] * one.trained_tokens))
        for each in trajectories()
        for one in each
    ]
    config = LearnerConfig(objective=ObjectiveConfig(entropy_coef=1.0))
    learner = Learner(TreePolicy(model), replace(config, optimizer=faster(config)))
    entropies = [learner.step(learner.plan(flat), weight_version=0).stats.entropy for _ in range(5)]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0] + 0.01


def faster(config: LearnerConfig) -> Any:
    return replace(config.optimizer, learning_rate=1e-2)


def test_level_of_ratios_sets_the_normalization() -> None:
    """Unless one is chosen: a ratio of trajectories comes with a mean over them."""
    chosen = {
        name: Objective(ObjectiveConfig(algorithm=name, ratio_level="trajectory")).normalization
        for name in ("gspo", "rloo")
    }
    assert chosen == {"gspo": "trajectory", "rloo": "trajectory_global"}
    given = ObjectiveConfig(algorithm="gspo", ratio_level="trajectory", normalization="token")
    assert Objective(given).normalization == "token"


def test_level_without_effect_is_refused() -> None:
    """With its name and value, and the algorithms that have such a ratio."""
    with pytest.raises(InvalidArgument, match=r"ratio_level = 'trajectory' .*cispo .*gspo, rloo"):
        Objective(ObjectiveConfig(ratio_level="trajectory"))
