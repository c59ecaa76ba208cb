"""The optimizer step: what it changes, what it refuses, and how it is repeated."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
)

from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes
from forge.rl.config import LearnerConfig, OptimizerConfig, Schedule
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import check_policy
from tests.support.rl.models import make_sample, tiny_model

SMALL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def learner(*, warmup_steps: int = 0) -> Learner:
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=warmup_steps)
    model = tiny_model("qwen3", torch.float32)
    return Learner(TreePolicy(model), LearnerConfig(optimizer=optimizer))


def samples() -> list[Sample]:
    rng = Random(3)
    prompt = [1, 2, 3, 4]
    return [make_sample([*prompt, token, token + 1], (4, 6), rng=rng) for token in range(5)]


def weights(one: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.policy.model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_step_makes_rewarded_tokens_likelier() -> None:
    """With positive advantages only, the log-probs of sampled tokens rise."""
    one = learner()
    rewarded = [replace(each, advantages=float32_bytes([1.0, 1.0])) for each in samples()]
    plan = one.plan(rewarded)
    (tree,) = plan.trees
    before = one.policy.logprobs(tree)[0].sum()
    result = one.step(plan, weight_version=1)
    assert one.policy.logprobs(tree)[0].sum() > before
    assert result.skipped == "" and one.steps == 1
    assert result.grad_norm > 0 and result.stats.entropy > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_step_changes_nothing(bad: float) -> None:
    """Weights, optimizer state and step count stay; the reason is returned."""
    one = learner()
    one.step(one.plan(samples()), weight_version=1)
    before = weights(one)
    poisoned = [replace(samples()[0], advantages=float32_bytes([bad, 1.0])), *samples()[1:]]
    result = one.step(one.plan(poisoned), weight_version=1)
    assert "loss" in result.skipped
    assert same(weights(one), before) and one.steps == 1
    assert one.step(one.plan(samples()), weight_version=1).skipped == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_changes_nothing(bad: float) -> None:
    """Of one weight, in the backward pass only: the loss is finite, the step is skipped, and the
    next one is as if it had not been."""
    one, other = learner(), learner()
    for each in (one, other):
        each.step(each.plan(samples()), weight_version=1)
    before = weights(one)
    weight = one.policy.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    spoiled = torch.zeros_like(weight)
    spoiled[0, 0] = bad
    hook = weight.register_hook(lambda gradient: gradient + spoiled)
    result = one.step(one.plan(samples()), weight_version=1)
    hook.remove()
    assert math.isfinite(result.loss) and not math.isfinite(result.grad_norm)
    assert f"loss {result.loss}, gradient norm" in result.skipped
    assert same(weights(one), before) and one.steps == 1
    for each in (one, other):
        each.step(each.plan(samples()), weight_version=1)
    assert same(weights(one), weights(other))


def test_batch_without_trained_tokens_is_skipped() -> None:
    """It has no gradient."""
    one = learner()
    before = weights(one)
    nothing = make_sample([1, 2, 3], rng=Random(0))
    assert one.step(one.plan([nothing]), weight_version=1).skipped == "no trained tokens"
    assert same(weights(one), before)


def test_flat_batch_has_a_loss_and_no_gradient() -> None:
    """Zero advantages are an ordinary step of size zero."""
    one = learner()
    before = weights(one)
    flat = [replace(each, advantages=float32_bytes([0.0, 0.0])) for each in samples()]
    result = one.step(one.plan(flat), weight_version=1)
    assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, "")
    assert same(weights(one), before)


def test_restored_learner_takes_the_same_steps_bit_for_bit() -> None:
    """From weights and state_dict alone."""
    one, other = learner(warmup_steps=4), learner(warmup_steps=4)
    for _ in range(2):
        one.step(one.plan(samples()), weight_version=1)
    other.policy.model.load_state_dict(weights(one))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    results = [each.step(each.plan(samples()), weight_version=1) for each in (one, other)]
    assert results[0].loss == results[1].loss
    assert same(weights(one), weights(other)) and other.steps == 3


def test_learning_rate_warms_up_linearly() -> None:
    """The first of four warm-up steps is a quarter as long: AdamW's first step is its rate."""
    moves = []
    for warmup in (0, 4):
        one = learner(warmup_steps=warmup)
        before = weights(one)
        one.step(one.plan(samples()), weight_version=1)
        name = "model.layers.0.mlp.up_proj.weight"
        moves.append(float((weights(one)[name] - before[name]).abs().max()))
    assert moves[1] == pytest.approx(moves[0] / 4, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 0.75, 0.5, 0.25, 0.1, 0.1]),
        ("cosine", [0.5, 0.853553, 0.5, 0.146447, 0.1, 0.1]),
    ],
)
def test_learning_rate_follows_its_schedule(schedule: Schedule, rates: list[float]) -> None:
    """After the warm-up it falls to a tenth at the last update, and stays there."""
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=2, learning_rate_schedule=schedule)
    config = LearnerConfig(optimizer=optimizer, total_updates=4)
    assert [config.rate(update) for update in range(6)] == pytest.approx(rates, rel=1e-5)


def test_plan_reports_the_merge_ratio() -> None:
    """Five answers of two tokens to a prompt of four: 30 tokens become 14."""
    plan = learner().plan(samples())
    assert (plan.sample_tokens, plan.tree_tokens, plan.trained_tokens) == (30, 14, 10)


def test_step_reports_the_gradient_share_of_each_domain() -> None:
    """Shares of the sum of |d loss / d log pi|: here the token mean of ratio times advantage."""
    one = learner()
    mixed = [
        replace(each, domain="qa" if index else "code", advantages=float32_bytes([1.0, -1.0]),
                behavior_logprobs=float32_bytes([-50.0, -50.0]))
        for index, each in enumerate(samples())
    ]  # fmt: skip
    domains = one.step(one.plan(mixed), weight_version=4).domains
    # Every ratio is far beyond the cap, so every token pulls alike.
    assert domains["code"].gradient_share == pytest.approx(0.2)
    assert domains["qa"].gradient_share == pytest.approx(0.8)
    assert (domains["code"].tokens, domains["qa"].tokens) == (2, 8)
    assert domains["qa"].clip_fraction == 1.0 and domains["qa"].entropy > 0


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_dense_model_passes_the_merge_check(family: str) -> None:
    """Merged log-probs equal the model's own."""
    check_policy(TreePolicy(tiny_model(family, torch.float32)))


def test_sliding_window_model_passes_the_merge_check() -> None:
    """Tree attention computes windows shorter than the sequences."""
    policy = TreePolicy(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)))
    check_policy(policy)
    assert not policy.unmerged
