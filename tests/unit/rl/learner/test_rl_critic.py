"""PPO's critic: advantages and values by hand, and on merged trees."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes
from forge.rl.config import CriticConfig, LearnerConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.critic import Credit, Critic, critic_stats, gae
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

LAMBDA, COEF = 0.5, 0.7


def test_gae_equals_values_by_hand() -> None:
    """Two turns: values .5 .2 .4 with return 1, and value .3 with return 0; lambda 1/2."""
    values = torch.tensor([0.5, 0.2, 0.4, 0.3])
    returns = torch.tensor([1.0, 1.0, 1.0, 0.0])
    # delta: .2-.5, .4-.2, 1-.4 | 0-.3; A3 = .6, A2 = .2 + .3, A1 = -.3 + .25
    expected = torch.tensor([-0.05, 0.5, 0.6, -0.3])
    assert torch.allclose(gae(values, returns, torch.tensor([3, 1]), lam=0.5), expected)


def test_lambda_1_is_return_minus_value_and_lambda_0_is_one_step() -> None:
    """The two ends of the scale."""
    values, returns = torch.tensor([0.5, 0.2, 0.4]), torch.ones(3)
    whole = torch.tensor([3])
    assert torch.allclose(gae(values, returns, whole, lam=1.0), returns - values)
    step = torch.tensor([-0.3, 0.2, 0.6])
    assert torch.allclose(gae(values, returns, whole, lam=0.0), step)


def test_long_answers_keep_their_digits() -> None:
    """The deltas of 20,000 tokens telescope: in fp32 their sum would carry 20,000 roundings."""
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(1))
    returns = torch.ones_like(values)
    found = gae(values, returns, torch.tensor([20_000]), lam=1.0)
    assert torch.equal(found, returns - values)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_of_many_blocks_is_that_of_a_loop_over_tokens(lam: float, dtype: torch.dtype) -> None:
    """In fp64, for samples of one token, of whole blocks, of one token more or less, and of many
    blocks; in fp32 only the deltas and the result are rounded."""
    lengths = [1, 2, 127, 128, 129, 256, 257, 1000, 1, 3000]
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(sum(lengths), generator=generator, dtype=dtype)
    each = torch.randn(len(lengths), generator=generator, dtype=dtype)
    returns = each.repeat_interleave(torch.tensor(lengths))
    expected: list[float] = []
    for own, outcome in zip(values.double().split(lengths), each.tolist(), strict=True):
        following, carried = outcome, 0.0
        found = []
        for value in reversed(own.tolist()):
            carried = following - value + lam * carried
            following = value
            found.append(carried)
        expected += reversed(found)
    result = gae(values, returns, torch.tensor(lengths), lam=lam)
    assert result.dtype == dtype
    error = (result.double() - torch.tensor(expected, dtype=torch.float64)).abs().max()
    assert error < (1e-13 if dtype == torch.float64 else 1e-5)


def test_clipped_value_loss_equals_values_by_hand() -> None:
    """Inside the clip the plain error counts; beyond it the larger of the two."""
    config = CriticConfig(value_clip=0.2)
    critic = Critic(2, config, device=torch.device("cpu"), dtype=torch.float32)
    credit = Credit(
        values=torch.tensor([0.0, 0.0, 0.0]),
        targets=torch.tensor([1.0, 1.0, -1.0]),
        advantages=torch.zeros(3),
    )
    values = torch.tensor([0.1, 0.5, 0.5], requires_grad=True)
    losses = critic.loss(values, credit)
    # (.1-1)^2/2; max(.25, (.2-1)^2)/2; max(2.25, (.2+1)^2)/2
    assert torch.allclose(losses, torch.tensor([0.405, 0.32, 1.125]))
    (pull,) = torch.autograd.grad(losses.sum(), values)
    assert torch.allclose(pull, torch.tensor([-0.9, 0.0, 1.5]))


def test_explained_variance_equals_values_by_hand() -> None:
    """Targets 0 and 2 have variance 1; residuals 0 and 1 have 1/4."""
    stats = critic_stats(
        [Credit(values=torch.tensor([0.0, 1.0]), targets=torch.tensor([0.0, 2.0]),
                advantages=torch.zeros(2))]
    )  # fmt: skip
    assert stats.explained_variance == pytest.approx(0.75)
    assert stats.value_loss == pytest.approx(0.25)


def forked(rng: Random) -> list[Sample]:
    """Shared prompts, a fork within an answer, and one edge with two returns."""
    sequences = [
        ([1, 2, 3, 4, 5, 6], 3), ([1, 2, 3, 4, 7], 3), ([1, 2, 3, 4, 5, 6], 3), ([1, 2, 8, 9], 2),
        ([5, 2, 8, 9, 1, 2, 3], 4),
    ]  # fmt: skip
    samples = []
    for ids, start in sequences:
        plain = make_sample(ids, (start, len(ids)), rng=rng)
        count = len(ids) - start
        earned = rng.uniform(-1, 1)
        weights = [rng.uniform(0.5, 1) for _ in range(count)]
        samples.append(
            replace(
                plain,
                returns=float32_bytes([earned] * count),
                advantages=float32_bytes(weights),
            )
        )
    return samples


def learner(budget: int, **settings: Any) -> Learner:
    config = LearnerConfig(
        token_budget=budget,
        objective=ObjectiveConfig(algorithm="ppo"),
        critic=CriticConfig(gae_lambda=LAMBDA, value_coef=COEF),
        **settings,
    )
    one = Learner(TreePolicy(tiny_model("qwen3", torch.float64)), config)
    assert one._critic is not None
    with torch.no_grad():
        one._critic.head.weight.copy_(torch.linspace(-0.3, 0.3, 16))
    return one


def all_gradients(one: Learner) -> dict[str, Tensor]:
    assert one._critic is not None
    head = {"value_head": one._critic.head.weight.grad}
    return {
        **gradients(one.policy.model),
        **{k: v.clone() for k, v in head.items() if v is not None},
    }


def by_sample(one: Learner, samples: Sequence[Sample]) -> Gradient:
    """The model's own forward, one sample after the other, everything written out."""
    model, head = one.policy.model, one._critic.head  # type: ignore[union-attr]
    model.set_attn_implementation("sdpa")
    model.zero_grad()
    head.zero_grad()
    tokens, loss, scale = sum(each.trained_tokens for each in samples), 0.0, 0.0
    total: dict[str, Tensor] = {}
    norms: dict[str, float] = {}
    for sample in samples:
        ids = torch.tensor(array("i", sample.ids))
        places = torch.cat([torch.arange(*span) for span in sample.trained])
        columns = (sample.behavior_logprobs, sample.advantages, sample.returns)
        behavior, weights, returns = (torch.tensor(array("f", each)) for each in columns)
        output = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        logprobs = output.logits[0].log_softmax(-1)[places - 1, ids[places]]
        values = output.hidden_states[-1][0, places - 1] @ head.weight[0]
        before = values.detach().tolist()
        advantages, carried, following = [], 0.0, float(returns[-1])
        for value in reversed(before):
            carried = following - value + LAMBDA * carried
            following = value
            advantages.append(carried)
        estimated = torch.tensor(advantages[::-1], dtype=torch.float64)
        ratio, gain = (logprobs - behavior).exp(), estimated * weights
        policy_loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        value_loss = (values - (estimated + values.detach())).square() / 2
        one_loss = (policy_loss + COEF * value_loss).sum() / tokens
        model.zero_grad()
        head.zero_grad()
        one_loss.backward()
        loss += float(one_loss.detach())
        scale += abs(float(one_loss.detach()))
        for name, gradient in all_gradients(one).items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
            norms[name] = norms.get(name, 0.0) + float(gradient.norm())
    return Gradient(loss=loss, of=total, loss_scale=scale, scale=norms)


@pytest.mark.parametrize("budget", [1000, 6, 3])
def test_merged_trees_have_the_gradient_of_one_sample_at_a_time(budget: int) -> None:
    """Policy, backbone and value head; whole, in several trees, and in passes that relay keys."""
    with wide_norms():
        samples = forked(Random(5))
        one = learner(budget)
        loss, _ = one.accumulate(one.plan(samples))
        merged = Gradient(loss=loss, of=all_gradients(one))
        loss_error, gradient_error = relative_errors(merged, by_sample(learner_of(one), samples))
    assert max(loss_error, gradient_error) < 1e-12


def learner_of(one: Learner) -> Learner:
    one.policy.model.zero_grad()
    return one


def test_critic_learns_and_is_saved_with_the_learner() -> None:
    """It learns the values of states, and a restored learner takes the same step."""
    settings: dict[str, Any] = {"optimizer": OptimizerConfig(learning_rate=1e-2)}
    one, other = learner(1000, **settings), learner(1000, **settings)
    samples = forked(Random(5))
    results = [one.step(one.plan(samples), weight_version=1) for _ in range(30)]
    assert results[-1].critic.value_loss < results[0].critic.value_loss / 3
    assert results[-1].critic.explained_variance > 0 > results[0].critic.explained_variance
    other.policy.model.load_state_dict(one.policy.model.state_dict())
    other.load_state_dict(one.state_dict())
    again = [each.step(each.plan(samples), weight_version=1) for each in (one, other)]
    assert again[0].loss == again[1].loss
    assert not any("value" in name for name in one.policy.model.state_dict())


def test_checkpoint_without_a_critic_is_refused() -> None:
    """Untrained values would add noise to every advantage."""
    plain = Learner(TreePolicy(tiny_model("qwen3", torch.float64)), LearnerConfig())
    with pytest.raises(InvalidArgument, match="'ppo' cannot continue from a checkpoint without"):
        learner(1000).load_state_dict(plain.state_dict())


def test_samples_without_returns_are_refused() -> None:
    """They come from the plan of another algorithm."""
    one = learner(1000)
    samples = [make_sample([1, 2, 3], (1, 3), rng=Random(1))]
    with pytest.raises(InvalidArgument, match="a critic needs returns"):
        one.step(one.plan(samples), weight_version=1)
