"""Losses of one sample, or one trajectory, at a time through the model's stock attention."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.learner import Learner
from forge.rl.losses.token_values import CLIPPED, TokenValues
from tests.support.rl.models import Gradient, gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Trained tokens of samples, one sample after another; all [T]."""

    logprobs: Tensor
    """Differentiable, like `entropy`."""
    behavior: Tensor
    advantages: Tensor
    entropy: Tensor


def column(data: bytes) -> Tensor:
    return torch.tensor(array("f", data))


def columns_of(model: Any, samples: Iterable[Sample]) -> Columns:
    """Of the samples' trained tokens, by one forward of the model for each sample."""
    if "forge" in str(model.config._attn_implementation):
        model.set_attn_implementation("sdpa")
    parts = []
    for sample in samples:
        ids_L = torch.tensor(array("i", sample.ids))
        places_T = torch.cat([torch.arange(*span) for span in sample.trained])
        logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
        all_TV = (logits_LV[places_T - 1] / sample.temperature).log_softmax(-1)
        logprobs_T = all_TV.gather(1, ids_L[places_T, None])[:, 0]
        entropy_T = -(all_TV.exp() * all_TV).sum(-1)
        given = (column(sample.behavior_logprobs), column(sample.advantages))
        parts.append((logprobs_T, *given, entropy_T))
    logprobs, behavior, advantages, entropy = map(torch.cat, zip(*parts, strict=True))
    return Columns(logprobs=logprobs, behavior=behavior, advantages=advantages, entropy=entropy)


def nearby(model: Any, batch: Sequence[Sample]) -> list[Sample]:
    """Behavior log-probs around the model's own, so that some ratios are clipped and some not."""
    rng = Random(5)
    made = []
    for one in batch:
        with torch.no_grad():
            own = columns_of(model, [one]).logprobs.tolist()
        near = float32_bytes([value + rng.uniform(-0.5, 0.5) for value in own])
        made.append(replace(one, behavior_logprobs=near))
    return made


def summed_gradient(
    model: Any, units: Iterable[Sequence[Sample]], loss: Callable[[Columns], Tensor]
) -> Gradient:
    """The sum of the losses of units (a sample, or the samples of a trajectory), one by one."""
    total, loss_scale = 0.0, 0.0
    of: dict[str, Tensor] = {}
    scale: dict[str, float] = {}
    for unit in units:
        model.zero_grad()
        one = loss(columns_of(model, unit))
        one.backward()
        total += float(one.detach())
        loss_scale += abs(float(one.detach()))
        for name, found in gradients(model).items():
            of[name] = of.get(name, torch.zeros_like(found)) + found
            scale[name] = scale.get(name, 0.0) + float(found.norm())
    return Gradient(loss=total, of=of, loss_scale=loss_scale, scale=scale)


def merged_gradient(learner: Learner, plan: BatchPlan) -> Gradient:
    """The learner's own, over merged trees."""
    loss, _ = learner.accumulate(plan)
    return Gradient(loss=loss, of=gradients(learner.policy.model))


def values_error(model: Any, samples: Sequence[Sample], found: TokenValues, *, cap: float) -> float:
    """The largest difference between token values and those of the model's own forward, relative
    to the latter above 1; infinity if CISPO's flags differ. `model` has the weights before the
    step, and `samples` are numbered in their order."""
    errors = [0.0]
    parts = found.columns.float().split(list(found.lengths), dim=1)
    for number, values in zip(found.numbers, parts, strict=True):
        with torch.no_grad():
            own = columns_of(model, [samples[number]])
        gaps_T = own.logprobs - own.behavior
        expected = torch.stack([own.logprobs, gaps_T, own.entropy, own.advantages])
        errors.append(float(((values[:4] - expected).abs() / expected.abs().clamp(min=1)).max()))
        if not torch.equal(values[4], (gaps_T.float().exp() > cap).float() * CLIPPED):
            return math.inf
    return max(errors)


def numbered(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with their place as number."""
    return [replace(one, number=place) for place, one in enumerate(samples)]
