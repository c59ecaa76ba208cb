"""What may be set about learning: optimizer, objective, correction, critic, heads.

Owns these settings and their validation; imports no torch, so that a process can read and refuse
settings before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from forge.core.errors import InvalidArgument
from forge.rl.algorithms import PRESETS, Normalization, load_custom, preset

Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw_8bit", "muon")
MtpLoss = Literal["topk_kl", "tv", "cross_entropy"]
MTP_LOSSES: tuple[MtpLoss, ...] = ("topk_kl", "tv", "cross_entropy")
OldLogprobs = Literal["behavior", "recomputed"]
KlEstimator = Literal["k1", "k2", "k3"]

FINAL_RATE_SHARE = 0.1
"""Of the learning rate, where a falling schedule ends."""
DEFAULT_RATIO_CAP = 5.0
"""ScaleRL (arXiv 2510.13786) finds CISPO insensitive between 4 and 8."""

_CLIPPED = ("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo", "ppo_clip")
"""Algorithms whose objective is `clipped_loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Which one, and its constants."""

    name: OptimizerName = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's: decay of the gradient's mean and of its square."""
    weight_decay: float = 0.0
    """Decoupled, on weights of two or more dimensions: not on norms and biases."""
    muon_momentum: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Which tokens count how much; by default all count fully."""

    weight_cap: float = 0.0
    """Truncated importance sampling: weigh tokens by min(pi_old / mu, cap); 0: do not. Only with
    recomputed old log-probs: elsewhere the loss's own ratio is this one already."""
    mask_ratio_low: float = 0.0
    mask_ratio_high: float = math.inf
    """Tokens whose pi/mu is outside [low, high] are left out (IcePop, arXiv 2510.18855)."""
    mask_staleness: int = 0
    """Tokens sampled more versions ago are left out; 0: none is."""
    mask_kl_max: float = 0.0
    """Samples with a larger mean of log(mu/pi) lose their tokens of negative advantage (the
    off-policy sequence mask of DeepSeek-V3.2, arXiv 2512.02556); 0: none do."""


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

    def check(self) -> None:
        """Raises `InvalidArgument` for settings that cannot be, or that would have no effect."""
        name, correction = self.algorithm, self.correction
        clips = preset(name).clip_high > 0
        for field_name in ("clip_low", "clip_high"):
            value = getattr(self, field_name)
            _require(field_name, value, 0 <= value < math.inf, "a finite number of at least 0")
            _require(
                field_name, value, clips or not value, f"0, since algorithm {name} does not clip"
            )
        _require("clip_low", self.clip_low, self.clip_low < 1, "less than 1")
        _require("ratio_cap", self.ratio_cap, self.ratio_cap > 0, "greater than 0")
        _require(
            "dual_clip", self.dual_clip,
            not self.dual_clip or (self.dual_clip > 1 and name in _CLIPPED),
            f"0, or greater than 1 with one of {', '.join(_CLIPPED)} (algorithm is {name})",
        )  # fmt: skip
        _require(
            "loss_options", dict(self.loss_options),
            not self.loss_options or name not in PRESETS,
            f"empty, since algorithm {name} is not a custom one",
        )  # fmt: skip
        _require(
            "normalization_tokens", self.normalization_tokens,
            not self.normalization_tokens
            or (self.normalization or preset(name).normalization) == "global",
            "0 unless normalization is global",
        )  # fmt: skip
        _require(
            "weight_cap", correction.weight_cap,
            not correction.weight_cap or self.old_logprobs == "recomputed",
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
        if name not in PRESETS:
            load_custom(name, self.loss_options)


def _require(name: str, value: object, allowed: bool, rule: str) -> None:
    if not allowed:
        raise InvalidArgument(f"{name} = {value!r} is not allowed: must be {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """How values are learned, and what becomes of them."""

    gae_lambda: float = 1.0
    """1: return less value, without bias; below, less variance and the values' bias."""
    value_coef: float = 0.5
    """Weight of the value loss beside the policy's."""
    value_clip: float = 0.2
    """Values move at most this far from those at the beginning of the batch before the loss stops
    pulling further; 0: any."""
    rate_scale: float = 1.0
    """Learning rate of the head over that of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Which heads, and how they learn."""

    heads: int = 0
    """How many tokens beyond the next they draft; 0: there are none."""
    loss: MtpLoss = "topk_kl"
    top_k: int = 64
    """Tokens that `topk_kl` looks at one by one."""
    learning_rate: float = 1e-4
    """Follows the policy's warm-up and schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    """Largest gradient norm of the heads."""

    def __post_init__(self) -> None:
        """Raises `InvalidArgument`."""
        if self.heads < 0 or self.top_k < 1:
            raise InvalidArgument(f"mtp heads = {self.heads}, top_k = {self.top_k} is not allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """How to step."""

    learning_rate: float = 1e-5
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly to its full value."""
    schedule: Schedule = "constant"
    """How it goes on from there, to `FINAL_RATE_SHARE` of it at `total_updates`."""
    total_updates: int = 0
    """At which the schedule ends; a constant one needs none."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    grad_clip: float = 1.0
    """Largest gradient norm; a larger one is scaled down to it."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Of an algorithm that has one."""
    mtp: MtpConfig = field(default_factory=MtpConfig)
    passes: int = 1
    """Updates per batch, each on all of it."""
    token_budget: int = 16384
    """Most tokens in one forward pass; more become several, with accumulated gradients."""
    token_budget_floor: int = 256
    """Where the lowering of the budget ends, when memory does not suffice."""

    def rate(self, update: int) -> float:
        """Learning rate of an update, counted from 0."""
        return self.learning_rate * self.rate_share(update)

    def rate_share(self, update: int) -> float:
        """Of the full learning rate, as warm-up and schedule have it."""
        rise = min(1.0, (update + 1) / max(1, self.warmup_steps))
        done = min(1.0, update / max(1, self.total_updates))
        match self.schedule:
            case "constant":
                left = 1.0
            case "linear":
                left = 1.0 - done
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * done))
        return rise * max(left, FINAL_RATE_SHARE)
