"""From settings to the loss of a pass: objective, correction, penalty, normalization.

Owns the choice, and the one place where a loss per token becomes a number.
A batch is summed over several passes, so every denominator is the whole batch's: a token weighs
the same wherever it was packed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.rl.algorithms import PRESETS, load_custom, preset
from forge.rl.config import Correction, ObjectiveConfig
from forge.rl.losses.correction import correction_weights
from forge.rl.losses.objectives import (
    cispo_loss,
    clipped_loss,
    clipped_tokens,
    gspo_loss,
    reinforce_loss,
    rloo_loss,
)
from forge.rl.losses.reference import kl_loss, kl_mean, kl_to_go
from forge.rl.losses.tokens import LossFunction, TrainedTokens


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
    """A validated `ObjectiveConfig` with its correction, ready to be evaluated."""

    def __init__(self, config: ObjectiveConfig, correction: Correction | None = None) -> None:
        """Raises `InvalidArgument` naming the field that cannot be."""
        self.config = config
        self.correction = correction or Correction()
        config.check(self.correction)
        own = preset(config.algorithm)
        self.clip_low = config.clip_low or own.clip_low
        self.clip_high = config.clip_high or own.clip_high
        self.normalization = config.normalized_by
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
                f"objective.algorithm = {self.config.algorithm!r} returned shape "
                f"{tuple(loss_T.shape)}; one loss per token is expected: "
                f"{tuple(tokens.logprobs.shape)}"
            )
        masked_T = _zeros(tokens, torch.bool)
        weights_T = correction_weights(self.correction, tokens)
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
