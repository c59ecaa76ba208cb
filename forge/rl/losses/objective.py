"""From settings to the loss of a pass: objective, correction, penalty, normalization.

Owns the choice and its validation, and the one place where a loss per token becomes a number.
A batch is summed over several passes, so every denominator is the whole batch's: a token weighs
the same wherever it was packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.rl.losses.algorithms import PRESETS, Normalization, load_custom, preset
from forge.rl.losses.correction import Correction, OldLogprobs
from forge.rl.losses.objectives import (
    DEFAULT_RATIO_CAP,
    cispo_loss,
    clipped_loss,
    clipped_tokens,
    gspo_loss,
    reinforce_loss,
    rloo_loss,
)
from forge.rl.losses.reference import KlEstimator, kl_loss, kl_mean, kl_to_go
from forge.rl.losses.tokens import LossFunction, TrainedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What is optimized. 0 and "" stand for the algorithm's own value."""

    algorithm: str = "cispo"
    """A name of `PRESETS`, or "package.module:function"."""
    loss_options: Mapping[str, float] = field(default_factory=dict)
    """Keyword arguments of a custom function."""
    ratio_cap: float = DEFAULT_RATIO_CAP
    """CISPO's."""
    clip_low: float = 0.0
    clip_high: float = 0.0
    dual_clip: float = 0.0
    normalization: Normalization | Literal[""] = ""
    normalization_tokens: int = 0
    old_logprobs: OldLogprobs = "behavior"
    correction: Correction = field(default_factory=Correction)
    kl_coef: float = 0.0
    """Weight of the penalty against the reference policy; 0: there is none."""
    kl_estimator: KlEstimator = "k2"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Of the whole batch, over all its passes: what a loss is divided by."""

    tokens: int
    """Trained ones."""
    samples: int
    """With at least one trained token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLoss:
    """What a pass adds to the loss of its batch."""

    loss: Tensor
    """Scalar, differentiable."""
    clipped: Tensor
    """[T] tokens whose ratio met a bound."""
    masked: Tensor
    """[T] tokens left out by the correction."""
    reference_kl: Tensor
    """[T] k3 estimate of the distance to the reference, or zeros."""


class Objective:
    """A validated `ObjectiveConfig`, ready to be evaluated."""

    def __init__(self, config: ObjectiveConfig) -> None:
        """Raises `InvalidArgument` naming the field that cannot be."""
        own = preset(config.algorithm)
        _check(config, clips=own.clip_high > 0)
        self.config = config
        self.clip_low = config.clip_low or own.clip_low
        self.clip_high = config.clip_high or own.clip_high
        self.normalization: Normalization = config.normalization or own.normalization
        self.normalization_tokens = config.normalization_tokens or own.normalization_tokens
        self.critic = own.critic
        """Whether advantages are a critic's."""
        self._loss = self._objective()

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy's log-probs are wanted."""
        return self.config.kl_coef > 0

    def evaluate(self, tokens: TrainedTokens, size: BatchSize) -> PassLoss:
        """The share of one pass in the loss of a batch of that size."""
        penalized = self._penalized(tokens)
        loss_T = self._loss(penalized)
        if loss_T.shape != tokens.logprobs.shape:
            raise InvalidArgument(
                f"algorithm = {self.config.algorithm!r} returned shape {tuple(loss_T.shape)}; one "
                f"loss per token is expected: {tuple(tokens.logprobs.shape)}"
            )
        masked_T = _zeros(tokens, torch.bool)
        weights_T = self.config.correction.weights(tokens)
        if weights_T is not None:
            masked_T = weights_T == 0
            # Not multiplied by 0: a masked token may well be the one that is infinite.
            loss_T = torch.where(masked_T, 0.0, loss_T * weights_T)
        distance_T = _zeros(tokens, tokens.logprobs.dtype)
        if tokens.reference is not None:
            distance_T = kl_mean(tokens)
            if self.config.kl_coef and self.config.kl_estimator != "k1":
                loss_T = loss_T + self.config.kl_coef * kl_loss(tokens, self.config.kl_estimator)
        return PassLoss(
            loss=self.normalized(loss_T, tokens, size),
            clipped=self._clipped(penalized),
            masked=masked_T,
            reference_kl=distance_T,
        )

    def _penalized(self, tokens: TrainedTokens) -> TrainedTokens:
        if not self.config.kl_coef or self.config.kl_estimator != "k1":
            return tokens
        return replace(
            tokens, advantages=tokens.advantages - self.config.kl_coef * kl_to_go(tokens)
        )

    def normalized(self, loss_T: Tensor, tokens: TrainedTokens, size: BatchSize) -> Tensor:
        """The share of a pass in a mean over the batch, as this objective takes means."""
        match self.normalization:
            case "token":
                return loss_T.sum() / size.tokens
            case "sequence":
                return (tokens.sums(loss_T) / tokens.lengths).sum() / size.samples
            case "global":
                return loss_T.sum() / (size.samples * self.normalization_tokens)

    def _clipped(self, tokens: TrainedTokens) -> Tensor:
        name = self.config.algorithm
        if name == "cispo":
            # In fp32, like the behavior log-probs: a ratio at the cap is not beyond it.
            gaps_T = tokens.logprobs.detach().float() - tokens.old.float()
            return gaps_T.exp() > self.config.ratio_cap
        if not self.clip_high:
            return _zeros(tokens, torch.bool)
        return clipped_tokens(tokens, name, clip_low=self.clip_low, clip_high=self.clip_high)

    def _objective(self) -> LossFunction:
        low, high = self.clip_low, self.clip_high
        match self.config.algorithm:
            case "cispo":
                return self._cispo
            case "reinforce":
                return reinforce_loss
            case "gspo":
                return partial(gspo_loss, clip_low=low, clip_high=high)
            case "rloo":
                return partial(rloo_loss, clip_low=low, clip_high=high)
            case name if name in PRESETS:
                dual = self.config.dual_clip
                return partial(clipped_loss, clip_low=low, clip_high=high, dual_clip=dual)
            case name:
                return load_custom(name, self.config.loss_options)

    def _cispo(self, tokens: TrainedTokens) -> Tensor:
        return cispo_loss(
            tokens.logprobs, tokens.old, tokens.advantages, ratio_cap=self.config.ratio_cap
        )


def _zeros(tokens: TrainedTokens, dtype: torch.dtype) -> Tensor:
    """[T], of one element: these are held while the model is differentiated."""
    return tokens.logprobs.new_zeros((), dtype=dtype).expand(tokens.logprobs.shape)


_CLIPPED = ("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo", "ppo_clip")
"""Algorithms whose objective is `clipped_loss`."""


def _check(config: ObjectiveConfig, *, clips: bool) -> None:
    """Raise `InvalidArgument` for settings that cannot be, or that would go unheard."""
    name, correction = config.algorithm, config.correction
    for field_name in ("clip_low", "clip_high"):
        value = getattr(config, field_name)
        _require(field_name, value, 0 <= value < math.inf, "a finite number of at least 0")
        _require(field_name, value, clips or not value, f"0, since algorithm {name} does not clip")
    _require("clip_low", config.clip_low, config.clip_low < 1, "less than 1")
    _require("ratio_cap", config.ratio_cap, config.ratio_cap > 0, "greater than 0")
    _require(
        "dual_clip", config.dual_clip,
        not config.dual_clip or (config.dual_clip > 1 and name in _CLIPPED),
        f"0, or greater than 1 with one of {', '.join(_CLIPPED)} (algorithm is {name})",
    )  # fmt: skip
    _require(
        "loss_options", dict(config.loss_options),
        not config.loss_options or name not in PRESETS,
        f"empty, since algorithm {name} is not a custom one",
    )  # fmt: skip
    _require(
        "normalization_tokens", config.normalization_tokens,
        not config.normalization_tokens
        or (config.normalization or preset(name).normalization) == "global",
        "0 unless normalization is global",
    )  # fmt: skip
    _require(
        "weight_cap", correction.weight_cap,
        not correction.weight_cap or config.old_logprobs == "recomputed",
        "0 unless old_logprobs is recomputed: the ratio against behavior log-probs would count "
        "twice",
    )  # fmt: skip
    _require(
        "mask_ratio_low", correction.mask_ratio_low,
        0 <= correction.mask_ratio_low < 1, "at least 0 and less than 1",
    )  # fmt: skip
    _require(
        "mask_ratio_high", correction.mask_ratio_high, correction.mask_ratio_high > 1,
        "greater than 1",
    )  # fmt: skip


def _require(name: str, value: object, allowed: bool, rule: str) -> None:
    if not allowed:
        raise InvalidArgument(f"{name} = {value!r} is not allowed: must be {rule}")
