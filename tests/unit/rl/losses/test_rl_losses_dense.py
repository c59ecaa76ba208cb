"""Random settings on random batches: loss, gradient and statistics are those written out by token.

Prompts are shared, answers are prefixes of each other or equal, tokens have several advantages,
samples several temperatures, shares, versions, spans, domains and trajectories; batches are in one
tree, in several, relayed, and divided into mini-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch

from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.rl.config import Correction, LearnerConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.learner import Learner
from forge.rl.learner.types import StepResult
from forge.rl.losses.stats import PolicyStats
from forge.rl.model.policy import TreePolicy
from tests.support.rl.dense import DenseToken, Policies, Rules, dense_update, frozen
from tests.support.rl.models import VOCABULARY, gradients, other_model, tiny_model, wide_norms

VERSION = 5
CLIPPED = ("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo_clip")
ALGORITHMS = (*CLIPPED, "cispo", "gspo", "rloo", "reinforce")
NORMALIZATIONS = ("auto", "token", "sequence", "trajectory", "global", "trajectory_global")


def batch(rng: Random, model: Any) -> list[Sample]:
    """Behavior log-probs are around the model's own, so that some ratios are clipped."""
    made: list[Sample] = []
    trajectory = 0
    for group in range(rng.randint(1, 4)):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        base = [rng.randrange(VOCABULARY) for _ in range(7)]
        domain = rng.choice(["code", "qa"])
        for _ in range(rng.randint(1, 4)):
            for _ in range(rng.randint(1, 2)):
                one = answer(rng, prompt, base)
                one = replace(one, domain=domain, group=group, trajectory=trajectory)
                made += [one] * (2 if rng.random() < 0.2 else 1)
            trajectory += 1
    near = []
    for one in made:
        logprobs = [value + rng.uniform(-0.5, 0.5) for value in frozen(model, one)]
        near.append(replace(one, behavior_logprobs=float32_bytes(logprobs)))
    return near


def answer(rng: Random, prompt: Sequence[int], base: Sequence[int]) -> Sample:
    own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
    sampled = [*base[: rng.randint(1, len(base))], *own]
    first, end = len(prompt), len(prompt) + len(sampled)
    spans: tuple[tuple[int, int], ...] = ((first, end),)
    if end - first > 3 and rng.random() < 0.3:
        spans = ((first, first + 1), (first + 2, end))
    count = sum(end - start for start, end in spans)
    advantages = [rng.choice([-1.5, 0.0, 0.7])] * count
    if rng.random() < 0.3:
        advantages = [rng.uniform(-1, 1) for _ in range(count)]
    return Sample(
        ids=int32_bytes([*prompt, *sampled]),
        trained=spans,
        behavior_logprobs=float32_bytes([0.0] * count),
        weight_versions=int32_bytes([rng.randrange(VERSION) for _ in range(count)]),
        advantages=float32_bytes(advantages),
        temperature=rng.choice([1.0, 0.7]),
        shares=rng.choice([b"", float32_bytes([rng.random() for _ in range(count)])]),
    )


def rules(rng: Random, algorithm: str) -> Rules:
    settings: dict[str, Any] = {"algorithm": algorithm, "ratio_cap": rng.choice([1.1, 5.0])}
    if algorithm in (*CLIPPED, "gspo", "rloo"):
        settings |= {"clip_low": 0.08, "clip_high": 0.12}
    if algorithm in CLIPPED and rng.random() < 0.5:
        settings["dual_clip"] = rng.choice([1.05, 1.3])
    if algorithm in ("gspo", "rloo") and rng.random() < 0.5:
        settings["ratio_level"] = "trajectory"
    settings["normalization"] = rng.choice(NORMALIZATIONS)
    if "global" in settings["normalization"]:
        settings["normalization_tokens"] = rng.choice([0, 7])
    if rng.random() < 0.5:
        settings |= {"kl_coef": 0.3, "kl_estimator": rng.choice(["k1", "k2", "k3"])}
    if rng.random() < 0.4:
        settings |= {"teacher_coef": 0.2, "teacher_only": rng.random() < 0.5}
    if rng.random() < 0.4:
        settings["entropy_coef"] = 0.05
    corrections: dict[str, Any] = {}
    if rng.random() < 0.4:
        settings["old_logprobs"] = "recomputed"
        corrections["weight_cap"] = 1.2
    if rng.random() < 0.4:
        corrections |= {"mask_ratio_low": 0.7, "mask_ratio_high": 1.4}
    if rng.random() < 0.3:
        corrections["mask_staleness"] = 2
    if rng.random() < 0.4:
        corrections["mask_kl_max"] = 0.02
    return Rules(objective=ObjectiveConfig(**settings), correction=Correction(**corrections))


def perturbed() -> Any:
    model = tiny_model("qwen3", torch.float64).requires_grad_(False)
    for index, parameter in enumerate(model.parameters()):
        parameter.mul_(1 + 0.05 * (-1) ** index)
    return model


def expected_stats(tokens: Sequence[DenseToken]) -> dict[str, float]:
    gaps = [one.value - one.behavior for one in tokens]
    sizes = sorted(map(abs, gaps))
    freshest = min(one.staleness for one in tokens)
    fresh = [abs(one.value - one.behavior) for one in tokens if one.staleness == freshest]
    return {
        "clip_fraction": fmean(one.clipped for one in tokens),
        "masked_fraction": fmean(one.masked for one in tokens),
        "entropy": fmean(float(one.entropy.detach()) for one in tokens),
        "logprob_gap_mean": fmean(sizes),
        "logprob_gap_p99": sizes[max(1, round(0.99 * len(sizes))) - 1],
        "inference_gap_mean": fmean(fresh),
        "inference_gap_staleness": freshest,
        "staleness_mean": fmean(one.staleness for one in tokens),
        "staleness_max": max(one.staleness for one in tokens),
    }


def check_stats(found: StepResult, tokens: Sequence[DenseToken]) -> None:
    stats: PolicyStats = found.stats
    for name, value in expected_stats(tokens).items():
        assert getattr(stats, name) == pytest.approx(value, abs=1e-6), name
    for domain, of_domain in found.domains.items():
        own = [one for one in tokens if one.sample.domain == domain]
        assert of_domain.tokens == len(own)
        for name in ("clip_fraction", "entropy", "staleness_mean"):
            value = expected_stats(own)[name]
            assert getattr(of_domain, name) == pytest.approx(value, abs=1e-6), (domain, name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_update_equals_the_one_written_out_by_token(algorithm: str) -> None:
    """In fp64: loss to 3e-8 (advantages are fp32), gradients to 1e-8, statistics to 1e-6."""
    rng = Random(algorithm)
    for _ in range(2):
        with wide_norms():
            check(rng, rules(rng, algorithm))


def check(rng: Random, settings: Rules) -> None:
    model, objective = tiny_model("qwen3", torch.float64), settings.objective
    policies = Policies(
        model=model,
        reference=perturbed() if objective.kl_coef else None,
        teacher=other_model(torch.float64) if objective.teacher_coef else None,
    )
    samples = batch(rng, model)
    learner = Learner(
        TreePolicy(model),
        LearnerConfig(
            optimizer=OptimizerConfig(learning_rate=0.0),
            objective=objective,
            correction=settings.correction,
            token_budget=rng.choice([1 << 20, 24, 9]),
            mini_batches=rng.choice([1, 1, 3]),
        ),
        reference=TreePolicy(policies.reference) if objective.kl_coef else None,
        teacher=TreePolicy(policies.teacher) if objective.teacher_coef else None,
    )
    plan = learner.plan(samples)
    tokens: list[DenseToken] = []
    losses = []
    for update in plan.updates:
        found, _ = learner.accumulate(update, weight_version=VERSION)
        actual = gradients(model)
        expected, of_update = dense_update(policies, update.samples, settings, version=VERSION)
        model.zero_grad()
        expected.backward()
        of = gradients(model)
        assert found == pytest.approx(float(expected.detach()), rel=3e-8, abs=3e-8)
        largest = max(float(one.norm()) for one in of.values())
        for name, gradient in of.items():
            assert float((actual[name] - gradient).norm()) <= 1e-8 * largest, name
        tokens += of_update
        losses.append(float(expected.detach()))
    result = learner.step(plan, weight_version=VERSION)
    assert result.loss == pytest.approx(fmean(losses), rel=3e-8, abs=3e-8)
    check_stats(result, tokens)
