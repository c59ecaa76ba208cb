"""Values of single tokens of a step: equal to those of the model's own forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forge.core.token_columns import float32_bytes
from forge.rl.config import Correction, LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.losses.token_values import CLIPPED, COLUMNS, MASKED
from forge.rl.model.policy import TreePolicy
from tests.support.rl.forests import forest
from tests.support.rl.models import CAP, tiny_model
from tests.support.rl.per_sample import numbered, values_error

CISPO = ObjectiveConfig(ratio_cap=CAP)


@pytest.mark.parametrize(
    ("kind", "budget", "family", "passes_per_batch", "mini_batches"),
    [
        ("forked", 1 << 30, "qwen3", 1, 1),
        ("compacted", 5, "qwen3", 1, 1),  # passes that relay keys and values
        ("temperatures", 1 << 30, "qwen3", 2, 1),
        ("duplicate", 1 << 30, "llama4", 1, 1),  # separate samples
        ("roots", 40, "qwen3", 1, 3),
    ],
)
def test_token_values_equal_the_models_own_forward(
    kind: str, budget: int, family: str, passes_per_batch: int, mini_batches: int
) -> None:
    """Log-prob, ratio, entropy, advantage and clipping of each token, in each sample that shares
    it: whole trees, relayed passes, separate samples, several passes and mini-batches."""
    model = tiny_model(family, torch.float32)
    batch = numbered(forest(kind))
    config = LearnerConfig(
        token_budget=budget,
        objective=CISPO,
        passes_per_batch=passes_per_batch,
        mini_batches=mini_batches,
    )
    learner = Learner(TreePolicy(model), config)
    before = tiny_model(family, torch.float32)
    plan = learner.plan(batch)
    # The weights of later mini-batches are other ones: their first is enough.
    keep = [one.number for one in plan.updates[0].samples][::2]
    values = learner.step(plan, weight_version=5, keep=keep).token_values
    assert sorted(values.numbers) == sorted(keep)
    assert values.columns.shape == (len(COLUMNS), sum(values.lengths))
    assert values_error(before, batch, values, cap=CAP) <= 1e-3
    if kind == "roots":
        assert (values.columns[4] == CLIPPED).any() and (values.columns[4] == 0).any()


def test_unnamed_samples_have_no_values() -> None:
    """By default none are returned; numbers that are not in the batch select nothing."""
    learner = Learner(TreePolicy(tiny_model("qwen3", torch.float32)), LearnerConfig())
    plan = learner.plan(numbered(forest("forked")))
    assert learner.step(plan, weight_version=0).token_values.columns.shape == (5, 0)
    assert learner.step(plan, weight_version=0, keep=[99]).token_values.numbers == ()


def test_masked_tokens_are_flagged_and_values_beyond_half_precision_clamped() -> None:
    """A token of a far behavior log-prob is masked by the correction; no value is infinite."""
    one = numbered(forest("linear"))[0]
    far = replace(
        one,
        behavior_logprobs=float32_bytes([-1e6, -2.0, -2.0]),
        advantages=float32_bytes([1e-3, 0.5, -0.5]),
    )
    correction = Correction(mask_ratio_high=1e6)
    learner = Learner(
        TreePolicy(tiny_model("qwen3", torch.float32)),
        LearnerConfig(objective=CISPO, correction=correction),
    )
    values = learner.step(learner.plan([far]), weight_version=0, keep=[0]).token_values
    assert values.columns[1, 0] == torch.finfo(torch.float16).max
    assert values.columns[4].tolist()[0] == CLIPPED + MASKED
    assert values.columns[4, 1:].max() < MASKED
