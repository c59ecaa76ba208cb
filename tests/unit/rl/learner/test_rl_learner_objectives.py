"""The learner with objectives other than the default: passes, references, losses of one's own."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes
from forge.rl.config import Correction, LearnerConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.learner import Learner
from forge.rl.losses import TrainedTokens
from forge.rl.model.policy import TreePolicy
from tests.support.rl.models import make_sample, tiny_model


def learner(
    *,
    passes_per_batch: int = 1,
    reference: TreePolicy | None = None,
    correction: Correction | None = None,
    **objective: Any,
) -> Learner:
    config = LearnerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2),
        passes_per_batch=passes_per_batch,
        objective=ObjectiveConfig(**objective),
        correction=correction or Correction(),
    )
    return Learner(TreePolicy(tiny_model("qwen3", torch.float32)), config, reference=reference)


def rewarded() -> list[Sample]:
    """Five answers to one prompt that all deserve to become likelier."""
    rng = Random(3)
    return [
        replace(
            make_sample([1, 2, 3, 4, token, token + 1], (4, 6), rng=rng),
            advantages=float32_bytes([1.0, 1.0]),
            behavior_logprobs=float32_bytes([-2.5, -2.5]),
        )
        for token in range(5)
    ]


def test_custom_loss_trains() -> None:
    """The example's loss falls from step to step, with its options, on merged trees."""
    one = learner(
        algorithm="examples.custom_loss:sapo",
        loss_options={"positive": 0.5},
        normalization="sequence",
    )
    plan = one.plan(rewarded())
    losses = [one.step(plan, weight_version=1).loss for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


def test_update_passes_report_the_metrics_of_the_first() -> None:
    """With recomputed log-probs the first pass has ratio 1, for any log-probs of the engine."""
    one = learner(passes_per_batch=3, algorithm="ppo_clip", old_logprobs="recomputed")
    result = one.step(one.plan(rewarded()), weight_version=1)
    assert one.steps == 3
    assert result.loss == pytest.approx(-1.0)
    assert (result.stats.clip_fraction, result.skipped, result.cut_short) == (0.0, "", "")


def infinite_later(tokens: TrainedTokens) -> Tensor:
    """Finite while nothing has moved."""
    moved = (tokens.logprobs.detach() != tokens.old).any()
    return tokens.logprobs * (math.inf if moved else 1.0)


def test_non_finite_later_pass_ends_the_batch() -> None:
    """The earlier updates stay, and the report differs from that of a skipped batch."""
    one = learner(
        passes_per_batch=3, algorithm=f"{__name__}:infinite_later", old_logprobs="recomputed"
    )
    result = one.step(one.plan(rewarded()), weight_version=1)
    assert one.steps == 1
    assert result.skipped == "" and "loss" in result.cut_short


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_keeps_the_policy_near_its_reference(estimator: str) -> None:
    """The distance is 0 at first; with the penalty it is smaller after the same steps."""
    distances = []
    for coefficient in (1e-9, 10.0):
        reference = TreePolicy(tiny_model("qwen3", torch.float32).requires_grad_(False))
        one = learner(
            kl_coef=coefficient, kl_estimator=estimator, algorithm="reinforce", reference=reference
        )
        plan = one.plan(rewarded())
        steps = [one.step(plan, weight_version=1).stats.reference_kl for _ in range(5)]
        assert steps[0] == 0.0
        distances.append(steps[-1])
    assert 0 < distances[1] < distances[0]


def test_kl_penalty_without_a_reference_is_refused() -> None:
    """There is nothing to keep close to."""
    with pytest.raises(InvalidArgument, match=r"kl_coef = 0\.1"):
        learner(kl_coef=0.1)


def test_staleness_is_counted_from_the_version_of_the_step() -> None:
    """Samples of versions 0 to 4, in a step from 4: those older than two versions are left out."""
    one = learner()
    masked = learner(correction=Correction(mask_staleness=2))
    plan = one.plan(rewarded())
    (tree,) = plan.trees
    old = float((tree.versions_T < 2).double().mean())
    assert one.step(plan, weight_version=4).stats.masked_fraction == 0.0
    assert masked.step(plan, weight_version=4).stats.masked_fraction == pytest.approx(old)
    assert 0 < old < 1
