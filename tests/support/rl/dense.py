"""An update written out token by token, after docs/algorithms.md: without trees, passes and ranks.

Every sample runs alone through the model's stock attention; ratios, bounds, masks and penalties are
Python numbers, so that only the differentiable terms are tensors.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.core.prefix_tree import Sample
from forge.rl.algorithms import PRESETS
from forge.rl.config import Correction, ObjectiveConfig

Numbers = list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The trained model and the frozen ones."""

    model: Any
    reference: Any = None
    teacher: Any = None


@dataclass(slots=True, kw_only=True)
class DenseToken:
    """One trained token."""

    sample: Sample
    logprob: Tensor
    """Differentiable, like `entropy`."""
    entropy: Tensor
    value: float
    """Of the log-prob."""
    behavior: float
    old: float
    advantage: float
    staleness: int
    reference: float
    teacher: float
    share: float
    credited: float = 0.0
    """Advantage with the teacher's part."""
    penalized: float = 0.0
    """The same with a k1 penalty."""
    clipped: bool = False
    masked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of a loss."""

    objective: ObjectiveConfig
    correction: Correction

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of ratios."""
        own, config = PRESETS[self.objective.algorithm], self.objective
        return 1 - (config.clip_low or own.clip_low), 1 + (config.clip_high or own.clip_high)


def dense_update(
    policies: Policies, samples: Sequence[Sample], rules: Rules, *, version: int
) -> tuple[Tensor, list[DenseToken]]:
    """The loss of one update on the samples, and their tokens."""
    per_sample = [_tokens(policies, one, rules, version) for one in samples]
    trajectories: dict[int, list[DenseToken]] = {}
    for one, tokens in zip(samples, per_sample, strict=True):
        trajectories.setdefault(one.trajectory, []).extend(tokens)
    count = sum(map(len, per_sample))
    loss = torch.zeros((), dtype=torch.float64)
    own, config = PRESETS[rules.objective.algorithm], rules.objective
    length = config.normalization_tokens or own.normalization_tokens
    for one, tokens in zip(samples, per_sample, strict=True):
        whole = trajectories[one.trajectory]
        total = sum(_losses(tokens, whole, rules), torch.zeros((), dtype=torch.float64))
        divisor = {
            "token": count,
            "sequence": len(tokens) * len(samples),
            "trajectory": len(whole) * len(trajectories),
            "global": length * len(samples),
            "trajectory_global": length * len(trajectories),
        }[config.normalized_by]
        loss = loss + total / divisor
    return loss, [token for tokens in per_sample for token in tokens]


def columns(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the trained tokens, differentiable."""
    kept = model.config._attn_implementation
    if "forge" in str(kept):
        model.set_attn_implementation("sdpa")
    ids_L = torch.tensor(array("i", sample.ids))
    logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
    model.set_attn_implementation(kept)
    places_T = torch.cat([torch.arange(*span) for span in sample.trained])
    # The wire has it in float32.
    temperature = float(torch.tensor(sample.temperature, dtype=torch.float32))
    all_TV = (logits_LV[places_T - 1] / temperature).log_softmax(-1)
    logprobs_T = all_TV.gather(1, ids_L[places_T, None])[:, 0]
    return logprobs_T, -(all_TV.exp() * all_TV).sum(-1)


def frozen(model: Any, sample: Sample) -> Numbers:
    """Log-probs as numbers; zeros without a model."""
    if model is None:
        return [0.0] * sample.trained_tokens
    with torch.no_grad():
        values: Numbers = columns(model, sample)[0].tolist()
    return values


def _tokens(policies: Policies, sample: Sample, rules: Rules, version: int) -> list[DenseToken]:
    logprobs_T, entropies_T = columns(policies.model, sample)
    values, behavior = logprobs_T.tolist(), list(array("f", sample.behavior_logprobs))
    shares = list(array("f", sample.shares)) or [1.0] * len(values)
    old = values if rules.objective.old_logprobs == "recomputed" else behavior
    tokens = [
        DenseToken(
            sample=sample,
            logprob=logprobs_T[place],
            entropy=entropies_T[place],
            value=value,
            behavior=behavior[place],
            old=old[place],
            advantage=advantage,
            staleness=version - sampled,
            reference=reference,
            teacher=teacher,
            share=shares[place],
        )
        for place, (value, advantage, sampled, reference, teacher) in enumerate(
            zip(
                values,
                array("f", sample.advantages),
                array("i", sample.weight_versions),
                frozen(policies.reference, sample),
                frozen(policies.teacher, sample),
                strict=True,
            )
        )
    ]
    _credit(tokens, rules.objective)
    return tokens


def _credit(tokens: Sequence[DenseToken], config: ObjectiveConfig) -> None:
    for place, one in enumerate(tokens):
        earned = 0.0 if config.teacher_only else one.advantage
        one.credited = earned + config.teacher_coef * one.share * (one.teacher - one.value)
        one.penalized = one.credited
        if config.kl_estimator == "k1":
            to_go = sum(after.value - after.reference for after in tokens[place:])
            one.penalized -= config.kl_coef * one.share * to_go


def _losses(
    tokens: Sequence[DenseToken], trajectory: Sequence[DenseToken], rules: Rules
) -> list[Tensor]:
    """The loss of each token of a sample."""
    config, correction = rules.objective, rules.correction
    unit = trajectory if config.ratio_level == "trajectory" else tokens
    distance = sum(one.behavior - one.value for one in tokens) / len(tokens)
    losses = []
    for one in tokens:
        loss = _objective(one, unit, rules)
        one.masked = _is_masked(one, distance, correction)
        if one.masked:
            loss = torch.zeros((), dtype=torch.float64)
        elif correction.weight_cap:
            loss = loss * min(math.exp(one.old - one.behavior), correction.weight_cap)
        gap = one.logprob - one.reference
        if config.kl_coef and config.kl_estimator == "k2":
            loss = loss + config.kl_coef * one.share * gap**2 / 2
        if config.kl_coef and config.kl_estimator == "k3":
            loss = loss + config.kl_coef * one.share * (torch.exp(-gap) - 1 + gap)
        losses.append(loss - config.entropy_coef * one.entropy)
    return losses


def _is_masked(one: DenseToken, distance: float, rules: Correction) -> bool:
    ratio = math.exp(one.value - one.behavior)
    ratios = bool(rules.mask_ratio_low or rules.mask_ratio_high)
    return (
        (ratios and not rules.mask_ratio_low <= ratio <= (rules.mask_ratio_high or math.inf))
        or bool(rules.mask_staleness and one.staleness > rules.mask_staleness)
        or bool(rules.mask_kl_max and distance > rules.mask_kl_max and one.credited < 0)
    )


def _objective(one: DenseToken, unit: Sequence[DenseToken], rules: Rules) -> Tensor:
    config, advantage = rules.objective, one.penalized
    moved = one.logprob - one.value
    """0, with the gradient of the log-prob."""
    gap = sum(each.value - each.old for each in unit)
    match config.algorithm:
        case "cispo":
            ratio = math.exp(one.value - one.old)
            one.clipped = ratio > config.ratio_cap
            return -min(ratio, config.ratio_cap) * advantage * one.logprob
        case "reinforce":
            return -advantage * one.logprob
        case "gspo":
            ratio = math.exp(gap / len(unit))
            return _surrogate(one, ratio, ratio, rules, moved)
        case "rloo":
            ratio = math.exp(min(gap, 20.0))
            return _surrogate(one, ratio, ratio / len(unit), rules, moved * len(unit))
        case _:
            ratio = math.exp(one.value - one.old)
            return _surrogate(one, ratio, ratio, rules, moved)


def _surrogate(one: DenseToken, ratio: float, size: float, rules: Rules, moved: Tensor) -> Tensor:
    """`-min(r A, clip(r) A)`, where `size` of r is the token's; a bound removes the gradient."""
    low, high = rules.bounds
    dual, advantage = rules.objective.dual_clip, one.penalized
    bounds = (high, dual or high)
    bound = ratio
    if advantage > 0:
        bound = min(ratio, *bounds)
    elif advantage < 0:
        bound = max(ratio, low)
        bound = min(bound, max(bounds)) if dual else bound
    one.clipped = bound != ratio
    part = size * bound / ratio
    return -(part * advantage + (0.0 if one.clipped else size * advantage) * moved)
