"""The loss of a pass from the settings: objective, correction, penalty, normalization.

Owns the choice of the loss and the reduction from loss per token to a number. A batch is a sum over
passes, so every denominator is that of the whole batch: a token's weight does not depend on its
pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from forge.core.errors import ConfigError, first_line
from forge.core.extras import place_of
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
from forge.rl.losses.reference import kl_loss, kl_mean, kl_to_go, teacher_gaps
from forge.rl.losses.tokens import LossFunction, TrainedTokens
from forge.rl.out_of_memory import memory_shortage


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Size of a whole batch, over all passes: the denominators of the loss."""

    tokens: int
    """Trained tokens."""
    samples: int
    """Samples with at least one trained token."""
    trajectories: int = 0
    """Trajectories with at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLoss:
    """A pass's part of the loss of its batch."""

    loss: Tensor
    """Scalar, differentiable."""
    clipped: Tensor
    """[T] whether the token's ratio exceeds a bound."""
    masked: Tensor
    """[T] whether the correction masks the token."""
    reference_kl: Tensor
    """[T] k3 estimate of the KL to the reference, or zeros."""
    teacher_gaps: Tensor
    """[T] log pi - log pi_teacher, or zeros."""


class Objective:
    """A validated `ObjectiveConfig` with its correction."""

    def __init__(self, config: ObjectiveConfig, correction: Correction | None = None) -> None:
        """Raises `InvalidArgument` that names an invalid setting."""
        self.config = config
        self.correction = correction or Correction()
        config.check(self.correction)
        own = preset(config.algorithm)
        self.clip_low = config.clip_low or own.clip_low
        self.clip_high = config.clip_high or own.clip_high
        self.normalization = config.normalized_by
        self.normalization_tokens = config.normalization_tokens or own.normalization_tokens
        self.critic = own.critic
        """Whether a critic computes the advantages."""
        self.over_trajectories = config.ratio_level == "trajectory"
        """Whether one ratio is that of all trained tokens of a trajectory."""
        self._loss = self._objective()

    def evaluate(self, tokens: TrainedTokens, size: BatchSize) -> PassLoss:
        """One pass's part of the loss of a batch of this size. Raises `ConfigError` for a custom
        loss that fails or returns something else than a loss per token."""
        penalized = self._penalized(tokens)
        credited = penalized if self.config.teacher_coef > 0 else tokens
        weights_T = correction_weights(self.correction, credited)
        masked_T = _zeros(tokens, torch.bool)
        if weights_T is not None:
            masked_T = weights_T == 0
            # The ratio of a masked token may be infinite: 0 times its gradient is NaN.
            kept_T = torch.where(masked_T, penalized.logprobs.detach(), penalized.logprobs)
            penalized = replace(penalized, logprobs=kept_T)
        loss_T = self._loss(penalized)
        if weights_T is not None:
            # Not a product with 0: the loss of a masked token may be infinite.
            loss_T = torch.where(masked_T, 0.0, loss_T * weights_T)
        distance_T = _zeros(tokens, tokens.logprobs.dtype)
        if tokens.reference is not None:
            distance_T = kl_mean(tokens)
            if self.config.kl_coef and self.config.kl_estimator != "k1":
                penalty_T = tokens.shared(kl_loss(tokens, self.config.kl_estimator))
                loss_T = loss_T + self.config.kl_coef * penalty_T
        if self.config.entropy_coef:
            loss_T = loss_T - self.config.entropy_coef * tokens.entropy
        return PassLoss(
            loss=self.normalized(loss_T, tokens, size),
            clipped=self._clipped(penalized),
            masked=masked_T,
            reference_kl=distance_T,
            teacher_gaps=_zeros(tokens, tokens.logprobs.dtype)
            if tokens.teacher is None
            else teacher_gaps(tokens),
        )

    def _penalized(self, tokens: TrainedTokens) -> TrainedTokens:
        """The tokens with the advantages of the KL penalty and of the teacher."""
        config = self.config
        if config.teacher_coef > 0:
            earned_T = tokens.advantages
            if config.teacher_only:
                earned_T = torch.zeros_like(earned_T)
            taught_T = earned_T - config.teacher_coef * tokens.shared(teacher_gaps(tokens))
            tokens = replace(tokens, advantages=taught_T)
        if not config.kl_coef or config.kl_estimator != "k1":
            return tokens
        penalty_T = config.kl_coef * tokens.shared(kl_to_go(tokens))
        return replace(tokens, advantages=tokens.advantages - penalty_T)

    def normalized(self, loss_T: Tensor, tokens: TrainedTokens, size: BatchSize) -> Tensor:
        """A pass's part of the mean over the batch, by this objective's normalization."""
        match self.normalization:
            case "token":
                return loss_T.sum() / size.tokens
            case "sequence":
                return (tokens.sums(loss_T) / tokens.lengths).sum() / size.samples
            case "trajectory":
                means_S = tokens.sums(loss_T) / tokens.trajectory_lengths
                return means_S.sum() / size.trajectories
            case "global":
                return loss_T.sum() / (size.samples * self.normalization_tokens)
            case "trajectory_global":
                return loss_T.sum() / (size.trajectories * self.normalization_tokens)

    def _clipped(self, tokens: TrainedTokens) -> Tensor:
        name = self.config.algorithm
        if name == "cispo":
            # In fp32, like the behavior log-probs: rounding must not put a ratio above the cap.
            gaps_T = tokens.logprobs.detach().float() - tokens.old.float()
            return gaps_T.exp() > self.config.ratio_cap
        if not self.clip_high:
            return _zeros(tokens, torch.bool)
        return clipped_tokens(
            tokens,
            name,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.config.dual_clip,
            trajectory=self.over_trajectories,
        )

    def _objective(self) -> LossFunction:
        low, high, trajectory = self.clip_low, self.clip_high, self.over_trajectories
        match self.config.algorithm:
            case "cispo":
                return self._cispo
            case "reinforce":
                return reinforce_loss
            case "gspo":
                return partial(gspo_loss, clip_low=low, clip_high=high, trajectory=trajectory)
            case "rloo":
                return partial(rloo_loss, clip_low=low, clip_high=high, trajectory=trajectory)
            case name if name in PRESETS:
                dual = self.config.dual_clip
                return partial(clipped_loss, clip_low=low, clip_high=high, dual_clip=dual)
            case name:
                return partial(_custom_loss, name, load_custom(name, self.config.loss_options))

    def _cispo(self, tokens: TrainedTokens) -> Tensor:
        return cispo_loss(
            tokens.logprobs, tokens.old, tokens.advantages, ratio_cap=self.config.ratio_cap
        )


def _custom_loss(name: str, loss: LossFunction, tokens: TrainedTokens) -> Tensor:
    """The function's loss per token, [T]. Raises `ConfigError` in place of its errors, since the
    next batch would end the same; a shortage of memory remains one."""
    source = f"objective.algorithm = {name!r}"
    try:
        loss_T = loss(tokens)
    # The function's code may raise anything.
    except Exception as error:
        if memory_shortage(error):
            raise
        said = f"{type(error).__name__}: {first_line(error)}{place_of(error)}"
        raise ConfigError(f"{source} failed: {said}") from error
    expected = tuple(tokens.logprobs.shape)
    if not isinstance(loss_T, Tensor):
        raise ConfigError(
            f"{source} returned {type(loss_T).__name__}; a tensor of one loss per token is "
            f"expected, shape {expected}"
        )
    if loss_T.shape != expected:
        raise ConfigError(
            f"{source} returned shape {tuple(loss_T.shape)}; one loss per token is expected: "
            f"{expected}"
        )
    if tokens.logprobs.requires_grad and not loss_T.requires_grad:
        raise ConfigError(
            f"{source} returned values without a gradient; compute them from tokens.logprobs or "
            "tokens.ratio, without detach"
        )
    return loss_T


def _zeros(tokens: TrainedTokens, dtype: torch.dtype) -> Tensor:
    """[T] zeros that share one element, since they are held during the backward."""
    return tokens.logprobs.new_zeros((), dtype=dtype).expand(tokens.logprobs.shape)
