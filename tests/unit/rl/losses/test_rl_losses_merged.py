"""Every algorithm's gradient on merged trees is that of one sample at a time (invariant I5).

The reference writes each objective down per sample, sequence forms included, over the model's own
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from tests.support.rl.models import (
    Gradient,
    gradients,
    make_sample,
    relative_errors,
    tiny_model,
    wide_norms,
)
from tests.support.rl.per_sample import merged_gradient, nearby, summed_gradient

LOW, HIGH, LENGTH = 0.2, 0.3, 7

Reference = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A sample's loss from its log-probs, behavior log-probs and advantages."""


def surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)


def clipped(logprobs: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return surrogate((logprobs - behavior).exp(), advantages).sum()


def clipped_mean(logprobs: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return surrogate((logprobs - behavior).exp(), advantages).mean()


def gspo(logprobs: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return surrogate((logprobs - behavior).mean().exp(), advantages[0])


def rloo(logprobs: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return surrogate((logprobs - behavior).sum().exp(), advantages[0])


def reinforce(logprobs: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return -(logprobs * advantages).sum()


CASES: Mapping[str, tuple[Reference, str, dict[str, Any]]] = {
    "grpo": (clipped_mean, "samples", {}),
    "dr_grpo": (clipped, "constant", {"normalization_tokens": LENGTH}),
    "dapo": (clipped, "tokens", {}),
    "gspo": (gspo, "samples", {}),
    "rloo": (rloo, "samples", {}),
    "reinforce_pp": (clipped, "tokens", {}),
    "ppo_clip": (clipped, "tokens", {}),
    "reinforce": (reinforce, "tokens", {"clip_low": 0.0, "clip_high": 0.0}),
}


def samples() -> list[Sample]:
    """A group whose members share trained tokens, each with an advantage of its own."""
    rng = Random(11)
    prompt = [rng.randrange(13) for _ in range(6)]
    answers = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 3], [7], [1]]
    made = []
    for index, answer in enumerate(answers):
        ids = [*prompt, *answer]
        one = make_sample(ids, (6, len(ids)), rng=rng)
        advantage = (-1.0) ** index * (0.5 + index)
        made.append(replace(one, advantages=float32_bytes([advantage] * len(answer))))
    return made


def merged(model: Any, batch: list[Sample], objective: ObjectiveConfig, budget: int) -> Gradient:
    config = LearnerConfig(objective=objective, token_budget=budget)
    learner = Learner(TreePolicy(model), config)
    return merged_gradient(learner, learner.plan(batch))


@pytest.mark.parametrize("budget", [1 << 30, 10])
@pytest.mark.parametrize("name", CASES)
def test_merged_gradient_equals_the_per_sample_gradient(name: str, budget: int) -> None:
    """In fp64 to 1e-12, in one tree and cut into several."""
    loss, divisor, settings = CASES[name]
    with wide_norms():
        model = tiny_model("qwen3", torch.float64)
        batch = nearby(model, samples())
        tokens = sum(one.trained_tokens for one in batch)
        over = {"tokens": tokens, "samples": len(batch), "constant": len(batch) * LENGTH}[divisor]
        expected = summed_gradient(
            model,
            [[one] for one in batch],
            lambda one: loss(one.logprobs, one.behavior, one.advantages) / over,
        )
        objective = ObjectiveConfig(
            algorithm=name, **({"clip_low": LOW, "clip_high": HIGH} | settings)
        )
        errors = relative_errors(merged(model, batch, objective, budget), expected)
    assert max(errors) <= 1e-12


def test_default_loss_is_bit_for_bit_the_plain_expression() -> None:
    """CISPO's token mean in fp32: loss and gradients."""
    batch = samples()
    model = tiny_model("qwen3", torch.float32)
    learner = Learner(TreePolicy(model), LearnerConfig())
    plan = learner.plan(batch)
    loss, _ = learner.accumulate(plan)
    actual = gradients(model)
    model.zero_grad()
    (tree,) = plan.trees
    logprobs_T, _ = learner.policy.logprobs(tree)
    weights_T = (logprobs_T.detach() - tree.behavior_T).exp().clamp(max=5.0)
    plain = -(weights_T * tree.advantages_T * logprobs_T).sum() / plan.trained_tokens
    plain.backward()
    assert loss == float(plain.detach())
    assert all(torch.equal(actual[name], found) for name, found in gradients(model).items())


def test_token_shared_by_two_samples_has_the_sum_of_their_advantages() -> None:
    """The same answer with advantages 2 and -0.5 trains like one sample with 1.5."""
    one = samples()[0]
    model = tiny_model("llama", torch.float32)
    credits = [replace(one, advantages=float32_bytes([credit] * 3)) for credit in (2.0, -0.5, 1.5)]
    objective = ObjectiveConfig(normalization="global", normalization_tokens=1)
    both = merged(model, credits[:2], objective, 1 << 30).of
    single = merged(model, credits[2:], objective, 1 << 30).of
    for name, found in both.items():
        # The mean over two samples is half of the sum.
        assert torch.allclose(2 * found, single[name], rtol=1e-4, atol=1e-6)
