"""Settings of the trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from forge.core.credit.advantages import SPREAD_FLOOR, AdvantageRules
from forge.core.credit.rewards import RewardWeights
from forge.core.errors import InvalidArgument
from forge.rl.algorithms import preset
from forge.rl.config import (
    DEFAULT_RATIO_CAP,
    Correction,
    CriticConfig,
    KlEstimator,
    LearnerConfig,
    MtpConfig,
    MtpLoss,
    ObjectiveConfig,
    OldLogprobs,
    OptimizerConfig,
    OptimizerName,
    Schedule,
)
from forge.runtime.config import ServiceConfig
from services.trainer.data.samples import CreditRules


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Which adapters."""

    rank: int
    alpha: float
    """What they add is scaled by alpha / rank."""
    dropout: float
    targets: tuple[str, ...]
    """Names, or ends of names, of linear layers; `all-linear` for all but the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(ServiceConfig):
    """The learner: pulls batches from the scheduler, pushes weights to inference."""

    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 600.0
    """Longest wait, when stopping, for the step in hand and a checkpoint of it."""
    model_path: str = ""
    """Model directory, transformers layout: starting weights."""
    checkpoint_dir: str = ".forge/checkpoints"
    """Directory of the checkpoints."""
    checkpoint_every_steps: Annotated[int, Meta(ge=1)] = 10
    """Optimizer steps between checkpoints: what a crash can cost."""
    max_steps: Annotated[int, Meta(ge=0)] = 0
    """Optimizer steps to train for; 0: no end."""
    batch_groups: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Groups in a batch; 0: the scheduler's setting."""
    max_skipped_batches: Annotated[int, Meta(ge=0)] = 10
    """Batches without a usable gradient, in a row, that end the run; 0: none do."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of everything random in the trainer."""
    metrics_file: str = ""
    """File to append each step's metrics to; empty: none."""
    tensorboard_dir: str = ""
    """Directory of TensorBoard event files; empty: none."""
    wandb_project: str = ""
    """Project of Weights & Biases; empty: none."""
    eval_tasks: str = ""
    """JSON Lines file of held-out tasks, as `forge queue submit` takes, to evaluate on while
    training goes on; a task that names no group_size is attempted once; empty: none."""
    eval_every_steps: Annotated[int, Meta(ge=0)] = 0
    """Optimizer steps between evaluations; 0: none in between."""
    eval_at_start: bool = False
    """Also evaluate the starting weights."""
    eval_at_end: bool = True
    """Also evaluate the weights of step max_steps."""
    torch_threads: Annotated[int, Meta(ge=0)] = 0
    """Threads of the tensor library; 0: half the cores, inference has the rest."""
    device: str = "cpu"
    """Torch device, e.g. cpu or cuda:0; cuda with ranks: one device for each."""
    ranks: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes on this machine that compute each tree together."""
    autocast: Literal["none", "auto", "bfloat16"] = "none"
    """Type of the model's trunk; auto: bfloat16 where the device has it; master weights and the
    head are float32."""
    publish_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Type of the weights sent to inference; auto: the trunk's."""
    recompute_activations: bool = False
    """Compute each layer again on the way back: a third more work, and of a pass only what goes
    into the layers is kept."""
    token_budget: Annotated[int, Meta(ge=1)] = 16384
    """Most tokens in one forward pass; more accumulate gradients."""
    token_budget_floor: Annotated[int, Meta(ge=1)] = 256
    """When memory does not suffice the budget is halved, down to this."""
    optimizer: OptimizerName = "adamw"
    """muon: on matrices, AdamW on the rest; adamw_8bit: moments in 8 bits."""
    learning_rate: Annotated[float, Meta(ge=0)] = 1e-5
    """After the warm-up."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Steps of linear learning-rate warm-up."""
    learning_rate_schedule: Schedule = "constant"
    """How the learning rate goes on after the warm-up, to a tenth at max_steps."""
    adam_beta1: Annotated[float, Meta(ge=0, le=0.9999)] = 0.9
    """Decay of the gradient mean."""
    adam_beta2: Annotated[float, Meta(ge=0, le=0.999999)] = 0.95
    """Decay of the gradient square."""
    muon_momentum: Annotated[float, Meta(ge=0, le=0.9999)] = 0.95
    """Of Muon."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled weight decay; not on norms and biases."""
    grad_clip: Annotated[float, Meta(ge=1e-9)] = 1.0
    """Largest gradient norm."""
    lora_rank: Annotated[int, Meta(ge=0)] = 0
    """Train adapters of this rank on frozen weights (LoRA); 0: all weights."""
    lora_alpha: Annotated[float, Meta(ge=0)] = 32.0
    """What adapters add is scaled by lora_alpha / lora_rank."""
    lora_dropout: Annotated[float, Meta(ge=0, le=0.99)] = 0.0
    """Dropout before the adapters."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Linear layers with adapters, by the end of their names; all-linear."""
    passes_per_batch: Annotated[int, Meta(ge=1, le=64)] = 1
    """Optimizer updates on each batch."""
    algorithm: str = "cispo"
    """cispo, grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp, reinforce, ppo (critic), ppo_clip
    (none), or a loss of one's own: package.module:function."""
    loss_options: Mapping[str, float] = field(default_factory=dict)
    """Keyword arguments of a loss of one's own."""
    gae_lambda: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Of PPO's critic: below 1 less variance, and its bias."""
    value_coef: Annotated[float, Meta(ge=0)] = 0.5
    """Weight of the critic's loss."""
    value_clip: Annotated[float, Meta(ge=0)] = 0.2
    """How far a batch may move values; 0: any."""
    value_rate_scale: Annotated[float, Meta(ge=0)] = 1.0
    """Learning rate of the value head over that of the policy."""
    ratio_cap: Annotated[float, Meta(ge=0)] = DEFAULT_RATIO_CAP
    """CISPO's cap on the importance ratio itself: 1 + eps_high in the paper's terms."""
    clip_low: Annotated[float, Meta(ge=0)] = 0.0
    """Ratios are clipped below 1 - this; 0: the algorithm's own."""
    clip_high: Annotated[float, Meta(ge=0)] = 0.0
    """Ratios are clipped above 1 + this; 0: the algorithm's own."""
    dual_clip: Annotated[float, Meta(ge=0)] = 0.0
    """Largest ratio that a negative advantage is multiplied with; 0: any."""
    normalization: Literal["auto", "token", "sequence", "global"] = "auto"
    """token: mean over trained tokens; sequence: mean over samples of their token means; global:
    sum over samples times normalization_tokens; auto: the algorithm's own."""
    normalization_tokens: Annotated[int, Meta(ge=0)] = 0
    """Constant length of the global normalization; 0: the algorithm's own."""
    old_logprobs: OldLogprobs = "behavior"
    """What ratios are taken against: the engine's log-probs, or the trainer's own, recomputed as
    the batch begins."""
    weight_cap: Annotated[float, Meta(ge=0)] = 0.0
    """With recomputed log-probs: tokens weigh min(recomputed / engine's, this); 0: 1."""
    mask_ratio_low: Annotated[float, Meta(ge=0)] = 0.0
    """Tokens with a ratio to the engine's probability below are left out."""
    mask_ratio_high: Annotated[float, Meta(ge=0)] = 0.0
    """Tokens with a ratio above are left out; 0: none is."""
    mask_staleness: Annotated[int, Meta(ge=0)] = 0
    """Tokens sampled more weight versions ago are left out; 0: none is."""
    mask_kl_max: Annotated[float, Meta(ge=0)] = 0.0
    """Samples further than this (mean log-ratio, nats) from the policy lose their tokens of
    negative advantage; 0: none does."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL penalty against the reference; 0: none is held."""
    kl_estimator: KlEstimator = "k2"
    """k1: taken off the advantages; k2, k3: added to the loss."""
    reference_path: str = ""
    """Model directory of the reference; empty: model_path, the starting weights."""
    logprob_gap_alarm: Annotated[float, Meta(ge=0)] = 0.05
    """Mean |log-prob of trainer - engine| over the freshest tokens above which each step logs a
    warning; 0: never."""
    balance_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the load-balance loss of a mixture of experts; 0: none."""
    mtp_heads: Annotated[int, Meta(ge=0, le=8)] = 0
    """Heads that draft tokens, trained beside the policy; 0: none."""
    mtp_loss: MtpLoss = "topk_kl"
    """Of drafts: KL over the policy's likeliest tokens, total variation, or cross-entropy of the
    sampled tokens."""
    mtp_top_k: Annotated[int, Meta(ge=1)] = 64
    """Tokens that topk_kl looks at one by one."""
    mtp_learning_rate: Annotated[float, Meta(ge=0)] = 1e-4
    """Of the heads; follows the policy's warm-up and schedule."""
    alpha: float = 0.2
    """Weight of process rewards."""
    beta: float = 0.1
    """Weight of speed, added after the spread is divided by."""
    speed_step: Annotated[float, Meta(ge=1e-3, le=1)] = 0.05
    """Speeds count in whole steps of this from their group's mean."""
    nominal_tokens_per_s: Annotated[float, Meta(ge=1e-3)] = 50.0
    """What sampling counts for in completion times, whatever the engine took."""
    gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Discount per turn of later rewards."""
    baseline: Literal["auto", "group_mean", "leave_one_out", "batch_mean", "none"] = "auto"
    """What a return is compared with; auto: the algorithm's own."""
    normalize_std: Literal["auto", "none", "group", "batch", "domain"] = "auto"
    """Divide advantages by the spread of returns over this; auto: the algorithm's."""
    spread_floor: Annotated[float, Meta(ge=1e-6)] = SPREAD_FLOOR
    """A smaller spread of returns is taken as this."""
    domain_weights: Mapping[str, Annotated[float, Meta(ge=0)]] = field(default_factory=dict)
    """Factor on the advantages of a domain; 1 unless named."""
    drop_flat_groups: bool = False
    """Leave out groups whose rollouts all earned the same but for speed (DAPO)."""
    patience_s: Annotated[float, Meta(ge=1)] = 600.0
    """How long an unreachable scheduler or pool is waited for."""

    def validate(self) -> None:
        """Raises `InvalidArgument` for an objective that cannot be, naming setting and value."""
        if self.learning_rate_schedule != "constant" and not self.max_steps:
            raise InvalidArgument(
                f"learning_rate_schedule = {self.learning_rate_schedule} is not allowed "
                "with max_steps = 0: it falls to the last step, so there has to be one"
            )
        if not self.eval_tasks and (self.eval_every_steps or self.eval_at_start):
            name = "eval_every_steps" if self.eval_every_steps else "eval_at_start"
            raise InvalidArgument(
                f"{name} = {getattr(self, name)} is not allowed without eval_tasks, the "
                "file of tasks to evaluate on"
            )
        self.objective().check()
        own_baseline = self.credit_rules().advantages.baseline
        if preset(self.algorithm).critic:
            for name in ("baseline", "normalize_std"):
                if getattr(self, name) not in ("auto", "none"):
                    raise InvalidArgument(
                        f"{name} = {getattr(self, name)} is not allowed with algorithm = "
                        f"{self.algorithm}: its advantages are the critic's"
                    )
        if self.drop_flat_groups and own_baseline not in ("group_mean", "leave_one_out"):
            raise InvalidArgument(
                f"drop_flat_groups = True is not allowed: with baseline {own_baseline} a "
                "group that earned the same all over teaches something; use group_mean or "
                "leave_one_out"
            )

    def learner(self) -> LearnerConfig:
        """What concerns the optimizer step."""
        return LearnerConfig(
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            schedule=self.learning_rate_schedule,
            total_updates=self.max_steps * self.passes_per_batch,
            optimizer=OptimizerConfig(
                name=self.optimizer,
                betas=(self.adam_beta1, self.adam_beta2),
                weight_decay=self.weight_decay,
                muon_momentum=self.muon_momentum,
            ),
            grad_clip=self.grad_clip,
            objective=self.objective(),
            critic=CriticConfig(
                gae_lambda=self.gae_lambda,
                value_coef=self.value_coef,
                value_clip=self.value_clip,
                rate_scale=self.value_rate_scale,
            ),
            mtp=MtpConfig(
                heads=self.mtp_heads,
                loss=self.mtp_loss,
                top_k=self.mtp_top_k,
                learning_rate=self.mtp_learning_rate,
                betas=(self.adam_beta1, self.adam_beta2),
                grad_clip=self.grad_clip,
            ),
            passes=self.passes_per_batch,
            token_budget=self.token_budget,
            token_budget_floor=self.token_budget_floor,
        )

    def lora(self) -> LoraSettings | None:
        """The adapters; None when all weights are trained."""
        if not self.lora_rank:
            return None
        return LoraSettings(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            dropout=self.lora_dropout,
            targets=self.lora_targets,
        )

    def objective(self) -> ObjectiveConfig:
        """What is optimized."""
        texts: dict[str, Any] = {
            "normalization": "" if self.normalization == "auto" else self.normalization,
            "old_logprobs": self.old_logprobs,
            "kl_estimator": self.kl_estimator,
        }
        return ObjectiveConfig(
            algorithm=self.algorithm,
            loss_options=self.loss_options,
            ratio_cap=self.ratio_cap,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            normalization_tokens=self.normalization_tokens,
            correction=Correction(
                weight_cap=self.weight_cap,
                mask_ratio_low=self.mask_ratio_low,
                mask_ratio_high=self.mask_ratio_high or math.inf,
                mask_staleness=self.mask_staleness,
                mask_kl_max=self.mask_kl_max,
            ),
            kl_coef=self.kl_coef,
            **texts,
        )

    def credit_rules(self) -> CreditRules:
        """What concerns rewards and advantages."""
        own = preset(self.algorithm)
        baseline = own.baseline if self.baseline == "auto" else self.baseline
        spread = own.spread if self.normalize_std == "auto" else self.normalize_std
        return CreditRules(
            weights=RewardWeights(
                alpha=self.alpha, beta=self.beta, gamma=self.gamma, speed_step=self.speed_step
            ),
            tokens_per_s=self.nominal_tokens_per_s,
            advantages=AdvantageRules(
                baseline=baseline,
                spread=spread,
                spread_floor=self.spread_floor,
                domain_weights=self.domain_weights,
            ),
            critic=own.critic,
            drop_flat_groups=self.drop_flat_groups,
        )

    def threads(self) -> int:
        """Intra-operation threads to use, of each rank."""
        return self.torch_threads or max(1, (os.cpu_count() or 2) // 2 // self.ranks)
