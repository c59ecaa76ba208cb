"""Turns under a grammar: what the loss is given in place of what it cannot compute."""

from __future__ import annotations

import math

import pytest
import torch

from forge.core.credit.rewards import RewardWeights
from forge.core.token_columns import float32_array, float32_bytes, int32_bytes
from forge.v1 import common_pb2 as pb
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.grammar_correction import logprobs_without_mask, weighted_advantages
from services.trainer.samples.samples import build_samples

VOCABULARY = 7


def held(logprobs: list[float], allowed: list[float]) -> pb.SampledTokens:
    return pb.SampledTokens(
        ids=int32_bytes(range(len(logprobs))),
        logprobs=float32_bytes(logprobs),
        weight_versions=int32_bytes([1] * len(logprobs)),
        allowed_logprobs=float32_bytes(allowed),
    )


def test_samples_with_grammars_are_corrected_by_the_masked_share() -> None:
    """Behavior log-probs are those without the mask, advantages weigh the share it left; a turn
    without a grammar is unchanged, and wrong columns exclude the trajectory."""
    rules = CreditRules(weights=RewardWeights(alpha=0.0, beta=0.0, gamma=1.0))
    turns = [held([-0.5, -1.0], [-0.25, 0.0]), held([-0.5, -1.0], []), held([-0.5], [0.0, 0.0])]
    group = [
        pb.Trajectory(
            trajectory_id=f"t:0:{at}",
            turns=[
                pb.Turn(
                    parent_turn=-1,
                    prompt_ids=int32_bytes([1]),
                    sampled=sampled,
                    finish_reason=pb.FINISH_REASON_STOP,
                    temperature=1.0,
                )
            ],
            rewards=[
                pb.RewardEvent(
                    event_id="r", kind=pb.REWARD_KIND_OUTCOME, value=float(at == 0), turn_index=-1
                )
            ],
        )
        for at, sampled in enumerate(turns)
    ]
    built = build_samples([group], rules)
    assert built.excluded == 1
    masked, free = built.samples
    assert float32_array(masked.behavior_logprobs).tolist() == [-0.75, -1.0]
    assert float32_array(free.behavior_logprobs).tolist() == [-0.5, -1.0]
    first, second = float32_array(masked.advantages)
    assert first == pytest.approx(second * torch.tensor(-0.25).exp().item())
    assert len(set(float32_array(free.advantages))) == 1
    assert float32_array(masked.shares).tolist() == pytest.approx([math.exp(-0.25), 1.0])
    assert free.shares == b""


def test_corrected_gradient_is_that_of_the_masked_policy() -> None:
    """At one state and equal weights, the expected gradient of the weighted surrogate is Z times
    the exact policy gradient of the masked policy, if advantages have mean zero."""
    torch.manual_seed(0)
    logits_V = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    may_V = torch.tensor([True, False, True, True, False, False, True])
    pi_V = logits_V.log_softmax(-1)
    masked_V = logits_V.masked_fill(~may_V, -torch.inf).log_softmax(-1)
    share = (masked_V - pi_V)[may_V][0].neg().detach()
    advantages_V = torch.randn(VOCABULARY, dtype=torch.float64)
    mu_V = masked_V.detach().exp()
    advantages_V -= (mu_V * advantages_V).sum()

    ours = torch.zeros((), dtype=torch.float64)
    exact = torch.zeros((), dtype=torch.float64)
    for token in may_V.nonzero()[:, 0].tolist():
        sampled = held([masked_V[token].item()], [share.item()])
        (behavior,) = float32_array(logprobs_without_mask(sampled))
        (advantage,) = float32_array(weighted_advantages(sampled, advantages_V[token].item()))
        ratio = (pi_V[token].detach() - behavior).exp()
        assert ratio.item() == pytest.approx(1.0, abs=1e-6)
        ours = ours + mu_V[token] * ratio * advantage * pi_V[token]
        exact = exact + mu_V[token] * advantages_V[token] * masked_V[token]
    (ours_V,) = torch.autograd.grad(ours, logits_V, retain_graph=True)
    (exact_V,) = torch.autograd.grad(exact, logits_V)
    assert torch.allclose(ours_V, share.exp() * exact_V, atol=1e-6)
