"""Settings of learning: optimizer, objective, correction, critic, draft heads, mesh of ranks.

Owns these settings and their validation. Imports no torch, so that a process validates settings
before it loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

try:
    from msgspec import Meta
except ModuleNotFoundError:
    # Services have msgspec and check these bounds; `forge.rl` alone needs torch and transformers.
    Meta = dict  # type: ignore[assignment, misc]

from forge.core.errors import InvalidArgument
from forge.rl.algorithms import (
    OF_TRAJECTORIES,
    PRESETS,
    SEQUENCE_RATIOS,
    Normalization,
    load_custom,
    preset,
)

Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
MtpLoss = Literal["topk_kl", "tv", "cross_entropy"]
OldLogprobs = Literal["behavior", "recomputed"]
KlEstimator = Literal["k1", "k2", "k3"]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]

FINAL_RATE_SHARE = 0.1
"""Least share of the learning rate in a falling schedule."""
DEFAULT_RATIO_CAP = 5.0
"""ScaleRL (arXiv 2510.13786) finds CISPO insensitive between 4 and 8."""

_CLIPPED = ("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo", "ppo_clip")
"""Algorithms whose objective is `clipped_loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """An optimizer, its constants and its learning rate."""

    name: OptimizerName = "adamw"
    """muon: Muon on matrices, AdamW on the other weights; adamw_8bit: AdamW with moments in 8
    bits."""
    learning_rate: NotNegative = 1e-5
    """Learning rate after the warm-up."""
    learning_rate_schedule: Schedule = "constant"
    """Course of the learning rate after the warm-up; linear and cosine fall towards 0 at the last
    step, and stay at a tenth once they reach it."""
    warmup_steps: Count = 0
    """Updates over which the learning rate rises linearly to its full value; a batch counts as
    mini_batches times passes_per_batch."""
    adam_beta1: Annotated[float, Meta(ge=0, le=0.9999)] = 0.9
    """Decay of the gradient mean."""
    adam_beta2: Annotated[float, Meta(ge=0, le=0.999999)] = 0.95
    """Decay of the gradient square."""
    muon_momentum: Annotated[float, Meta(ge=0, le=0.9999)] = 0.95
    """Momentum of Muon."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, on weights of two or more dimensions: not on norms and biases."""
    grad_clip: Annotated[float, Meta(ge=1e-9)] = 1.0
    """Largest gradient norm; a larger gradient is scaled down to it."""

    @property
    def betas(self) -> tuple[float, float]:
        """Both decay rates, as torch takes them."""
        return self.adam_beta1, self.adam_beta2


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights and masks of tokens by their distance from the engine; by default all count fully."""

    weight_cap: NotNegative = 0.0
    """Truncated importance sampling: the weight of a token is min(recomputed probability / engine's
    probability, this); 0: weight 1. Only with old_logprobs = recomputed: otherwise the ratio of the
    loss is the importance ratio."""
    mask_ratio_low: NotNegative = 0.0
    """Least ratio of the policy's to the engine's probability; tokens below it are masked (IcePop,
    arXiv 2510.18855)."""
    mask_ratio_high: NotNegative = 0.0
    """Largest ratio of the policy's to the engine's probability; tokens above it are masked; 0: no
    limit."""
    mask_staleness: Count = 0
    """Largest staleness, in weight versions; tokens above it are masked; 0: no limit."""
    mask_kl_max: NotNegative = 0.0
    """Largest mean log-ratio of engine to policy in a sample, nats; above it the sample's tokens of
    negative advantage are masked (DeepSeek-V3.2's off-policy sequence mask, arXiv 2512.02556); 0:
    no limit."""

    def check(self, old_logprobs: OldLogprobs) -> None:
        """Raises `InvalidArgument` for settings that are invalid or without effect."""
        _require(
            "correction.weight_cap", self.weight_cap,
            not self.weight_cap or old_logprobs == "recomputed",
            "0 unless objective.old_logprobs is recomputed: the ratio against behavior log-probs "
            "would count twice",
        )  # fmt: skip
        _require(
            "correction.mask_ratio_low", self.mask_ratio_low,
            0 <= self.mask_ratio_low < 1, "at least 0 and less than 1",
        )  # fmt: skip
        _require(
            "correction.mask_ratio_high", self.mask_ratio_high,
            not self.mask_ratio_high or self.mask_ratio_high > 1, "0, or above 1",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """The loss of the policy."""

    algorithm: str = "cispo"
    """cispo, grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp, reinforce, ppo (with a critic),
    ppo_clip (without), or a custom loss: package.module:function."""
    loss_options: Mapping[str, float] = field(default_factory=dict)
    """Keyword arguments of a custom loss."""
    ratio_cap: NotNegative = DEFAULT_RATIO_CAP
    """CISPO's cap on the importance ratio itself: 1 + eps_high in the paper's terms."""
    clip_low: NotNegative = 0.0
    """Lower bound of ratios: 1 - this; 0: the algorithm's own."""
    clip_high: NotNegative = 0.0
    """Upper bound of ratios: 1 + this; 0: the algorithm's own."""
    dual_clip: NotNegative = 0.0
    """Largest ratio that multiplies a negative advantage; 0: no limit."""
    normalization: Literal["auto", Normalization] = "auto"
    """token: mean over trained tokens; sequence, trajectory: mean over turns, or trajectories, of
    the mean over their tokens; global, trajectory_global: sum over tokens, divided by
    normalization_tokens times the number of turns, or trajectories; auto: the algorithm's own, by
    trajectories if ratio_level is."""
    normalization_tokens: Count = 0
    """Constant length of a global normalization; 0: the algorithm's own."""
    ratio_level: Literal["turn", "trajectory"] = "turn"
    """Tokens of one ratio of gspo and rloo: those of a turn, or all trained tokens of a
    trajectory."""
    old_logprobs: OldLogprobs = "behavior"
    """Denominator of the ratios: the log-probs of the engine (behavior), or the trainer's own,
    recomputed as the batch begins."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL penalty against the reference policy; 0: no penalty, no reference."""
    kl_estimator: KlEstimator = "k2"
    """Estimator of the KL penalty: k1 (subtracted from the advantages), k2 or k3 (added to the
    loss)."""
    teacher_coef: NotNegative = 0.0
    """On-policy distillation: factor on log pi_teacher - log pi, which is added to a token's
    advantage; 0: no teacher (teacher_path)."""
    teacher_only: bool = False
    """Train on the teacher's advantages alone, not on rewards."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy at trained tokens, nats, is
    subtracted from the loss; 0: no bonus."""

    @property
    def normalized_by(self) -> Normalization:
        """The normalization in force."""
        if self.normalization != "auto":
            return self.normalization
        own = preset(self.algorithm).normalization
        return OF_TRAJECTORIES.get(own, own) if self.ratio_level == "trajectory" else own

    def check(self, correction: Correction) -> None:
        """Raises `InvalidArgument` for settings that are invalid or without effect."""
        self._check_clipping()
        name = self.algorithm
        _require(
            "objective.loss_options", dict(self.loss_options),
            not self.loss_options or name not in PRESETS,
            f"empty, since algorithm {name} is not a custom one",
        )  # fmt: skip
        _require(
            "objective.normalization_tokens", self.normalization_tokens,
            not self.normalization_tokens or "global" in self.normalized_by,
            "0 unless normalization is global or trajectory_global",
        )  # fmt: skip
        _require(
            "objective.ratio_level", self.ratio_level,
            self.ratio_level == "turn" or name in SEQUENCE_RATIOS,
            f"turn, since the ratios of algorithm {name} are of tokens "
            f"(trajectory: {', '.join(SEQUENCE_RATIOS)})",
        )  # fmt: skip
        _require(
            "objective.teacher_only", self.teacher_only,
            not self.teacher_only or self.teacher_coef > 0, "False unless teacher_coef is above 0",
        )  # fmt: skip
        correction.check(self.old_logprobs)
        if name not in PRESETS:
            load_custom(name, self.loss_options)

    def _check_clipping(self) -> None:
        name, clips = self.algorithm, preset(self.algorithm).clip_high > 0
        for key, value in (
            ("objective.clip_low", self.clip_low),
            ("objective.clip_high", self.clip_high),
        ):
            _require(key, value, 0 <= value < math.inf, "a finite number of at least 0")
            _require(key, value, clips or not value, f"0, since algorithm {name} does not clip")
        _require("objective.clip_low", self.clip_low, self.clip_low < 1, "less than 1")
        _require("objective.ratio_cap", self.ratio_cap, self.ratio_cap > 0, "greater than 0")
        _require(
            "objective.dual_clip", self.dual_clip,
            not self.dual_clip or (self.dual_clip > 1 and name in _CLIPPED),
            f"0, or greater than 1 with one of {', '.join(_CLIPPED)} (algorithm is {name})",
        )  # fmt: skip


def _require(name: str, value: object, allowed: bool, rule: str) -> None:
    if not allowed:
        raise InvalidArgument(f"{name} = {value!r} is not allowed: must be {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The critic of an algorithm that has one."""

    gae_lambda: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Lambda of generalized advantage estimation. 1: return minus value, without bias; below 1:
    less variance, and the bias of the values."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss beside the policy's."""
    value_clip: NotNegative = 0.2
    """Largest change of a value since the begin of the batch; beyond it the loss moves the value no
    further; 0: no limit."""
    value_rate_scale: NotNegative = 1.0
    """Learning rate of the value head as a multiple of the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReplayConfig:
    """Replay of the experts that inference chose, in a mixture of experts."""

    enabled: bool = False
    """Compute each token with its recorded experts; the model chooses those of tokens without a
    record. Gateways record with record_experts."""
    compare_every_steps: Annotated[int, Meta(ge=0)] = 10
    """Interval in steps of a comparison: the trainer computes one tree also without replay, and
    reports both gaps of log-probs; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Heads that draft tokens (multi-token prediction), trained beside the policy."""

    heads: Annotated[int, Meta(ge=0, le=8)] = 0
    """Number of draft heads; each drafts one more token beyond the next. 0: no heads."""
    loss: MtpLoss = "topk_kl"
    """Loss of a draft: KL over the policy's likeliest tokens, total variation, or cross-entropy of
    the sampled tokens."""
    top_k: Annotated[int, Meta(ge=1)] = 64
    """Tokens that topk_kl compares one by one."""
    learning_rate: NotNegative = 1e-4
    """Learning rate of the heads, with the policy's warm-up and schedule."""
    update_tokens: Annotated[int, Meta(ge=0)] = 0
    """Contexts of one update of the heads, about; 0: one update with each batch."""

    def __post_init__(self) -> None:
        """Raises `InvalidArgument`."""
        if self.update_tokens < 0:
            raise InvalidArgument(f"mtp update_tokens = {self.update_tokens} is not allowed")
        if self.heads < 0 or self.top_k < 1:
            raise InvalidArgument(f"mtp heads = {self.heads}, top_k = {self.top_k} is not allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Numbers of ranks in each dimension."""

    dp_replicate: int = 1
    """Copies of the model; each computes other trees."""
    dp_shard: int = 1
    """Data groups within a copy that shard its parameters; each computes other trees."""
    cp: int = 1
    """Ranges of each tree, computed by different ranks."""
    tp: int = 1
    """Ranks that compute every token of a range together: each has a part of the heads, of the
    inner channels and of the experts."""

    @property
    def ranks(self) -> int:
        """Size of the world."""
        return self.data_groups * self.group_ranks

    @property
    def group_ranks(self) -> int:
        """Ranks of a data group: they compute the same trees."""
        return self.cp * self.tp

    @property
    def data_groups(self) -> int:
        """Groups of ranks that compute different trees."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharded(self) -> bool:
        """Whether a rank holds only a part of the parameters. With `dp_shard = 1` and `tp = 1` each
        rank has all of them, and the group can retry a batch after a shortage of memory."""
        return self.dp_shard > 1 or self.tp > 1

    @property
    def shards(self) -> int:
        """Ranks over which a copy of the parameters is divided."""
        return self.dp_shard * self.cp * self.tp if self.sharded else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Settings of the optimizer step."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    total_updates: int = 0
    """Update at which a falling learning-rate schedule ends."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    correction: Correction = field(default_factory=Correction)
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Used by algorithms with a critic."""
    mtp: MtpConfig = field(default_factory=MtpConfig)
    passes_per_batch: int = 1
    """Update passes over each batch."""
    mini_batches: int = 1
    """Updates per update pass, each on other groups of the batch."""
    compare_replay_every: int = 0
    """`RoutingReplayConfig.compare_every_steps`, if experts are replayed."""
    token_budget: int = 16384
    """Most tokens in one forward pass; gradients of several passes are accumulated."""
    token_budget_floor: int = 256
    """Lower bound of the budget, which is halved when memory runs out."""

    @property
    def updates_per_batch(self) -> int:
        """Updates on a batch that has as many groups as mini-batches."""
        return self.passes_per_batch * self.mini_batches

    def rate(self, update: int) -> float:
        """Learning rate of an update, counted from 0."""
        return self.optimizer.learning_rate * self.rate_share(update)

    def rate_share(self, update: int) -> float:
        """Share of the full learning rate by warm-up and schedule, at an update."""
        rise = min(1.0, (update + 1) / max(1, self.optimizer.warmup_steps))
        done = min(1.0, update / max(1, self.total_updates))
        match self.optimizer.learning_rate_schedule:
            case "constant":
                left = 1.0
            case "linear":
                left = 1.0 - done
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * done))
        return rise * max(left, FINAL_RATE_SHARE)
