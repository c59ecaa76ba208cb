"""Settings of the trainer."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, cast

from forge.core.credit.advantages import SPREAD_FLOOR, AdvantageRules, Baseline, Spread
from forge.core.credit.rewards import RewardWeights
from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.learner.critic import CriticConfig
from forge.rl.learner.types import LearnerConfig, Schedule
from forge.rl.losses import DEFAULT_RATIO_CAP, Objective, ObjectiveConfig
from forge.rl.losses.algorithms import preset
from forge.rl.losses.correction import Correction
from forge.rl.mtp import MtpConfig, MtpLoss
from forge.rl.mtp.losses import LOSSES
from forge.rl.optimizers import NAMES, OptimizerConfig, OptimizerName
from forge.runtime.config import ServiceConfig, setting
from services.trainer.data.samples import CreditRules
from services.trainer.model.lora import LoraSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(ServiceConfig):
    """The learner: pulls batches from the scheduler, pushes weights to inference."""

    drain_s: float = setting(
        600.0, help="longest wait, when stopping, for the step in hand and a checkpoint of it",
        minimum=0, maximum=3600,
    )  # fmt: skip
    model_path: str = setting("", help="model directory, transformers layout: starting weights")
    checkpoint_dir: str = setting(".forge/checkpoints", help="directory of the checkpoints")
    checkpoint_every_steps: int = setting(
        10, help="optimizer steps between checkpoints: what a crash can cost", minimum=1
    )
    max_steps: int = setting(0, help="optimizer steps to train for; 0: no end", minimum=0)
    batch_groups: int = setting(
        0, help="groups in a batch; 0: the scheduler's setting", minimum=0, maximum=4096
    )
    max_skipped_batches: int = setting(
        10, help="batches without a usable gradient, in a row, that end the run; 0: none do",
        minimum=0,
    )  # fmt: skip
    seed: int = setting(0, help="seed of everything random in the trainer", minimum=0)
    metrics_file: str = setting("", help="file to append each step's metrics to; empty: none")
    tensorboard_dir: str = setting("", help="directory of TensorBoard event files; empty: none")
    wandb_project: str = setting("", help="project of Weights & Biases; empty: none")
    eval_tasks: str = setting(
        "", help="JSON Lines file of held-out tasks, as `forge queue submit` takes, to evaluate on "
        "while training goes on; a task that names no group_size is attempted once; empty: none",
    )  # fmt: skip
    eval_every_steps: int = setting(
        0, help="optimizer steps between evaluations; 0: none in between", minimum=0
    )
    eval_at_start: bool = setting(False, help="also evaluate the starting weights")
    eval_at_end: bool = setting(True, help="also evaluate the weights of step max_steps")
    torch_threads: int = setting(
        0, help="threads of the tensor library; 0: half the cores, inference has the rest",
        minimum=0,
    )  # fmt: skip
    device: str = setting(
        "cpu", help="torch device, e.g. cpu or cuda:0; cuda with ranks: one device for each"
    )
    ranks: int = setting(
        1, help="processes on this machine that compute each tree together", minimum=1, maximum=64
    )
    autocast: str = setting(
        "none", help="type of the model's trunk; auto: bfloat16 where the device has it; master "
        "weights and the head are float32", choices=("none", "auto", "bfloat16"),
    )  # fmt: skip
    publish_dtype: str = setting(
        "float32", help="type of the weights sent to inference; auto: the trunk's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    recompute_activations: bool = setting(
        False, help="compute each layer again on the way back: a third more work, and of a pass "
        "only what goes into the layers is kept",
    )  # fmt: skip
    token_budget: int = setting(
        16384, help="most tokens in one forward pass; more accumulate gradients", minimum=1
    )
    token_budget_floor: int = setting(
        256, help="when memory does not suffice the budget is halved, down to this", minimum=1
    )
    optimizer: str = setting(
        "adamw", help="muon: on matrices, AdamW on the rest; adamw_8bit: moments in 8 bits",
        choices=NAMES,
    )  # fmt: skip
    learning_rate: float = setting(1e-5, help="after the warm-up", minimum=0)
    warmup_steps: int = setting(0, help="steps of linear learning-rate warm-up", minimum=0)
    learning_rate_schedule: str = setting(
        "constant", help="how the learning rate goes on after the warm-up, to a tenth at max_steps",
        choices=("constant", "linear", "cosine"),
    )  # fmt: skip
    adam_beta1: float = setting(0.9, help="decay of the gradient mean", minimum=0, maximum=0.9999)
    adam_beta2: float = setting(
        0.95, help="decay of the gradient square", minimum=0, maximum=0.999999
    )
    muon_momentum: float = setting(0.95, help="of Muon", minimum=0, maximum=0.9999)
    weight_decay: float = setting(
        0.0, help="decoupled weight decay; not on norms and biases", minimum=0
    )
    grad_clip: float = setting(1.0, help="largest gradient norm", minimum=1e-9)
    lora_rank: int = setting(
        0, help="train adapters of this rank on frozen weights (LoRA); 0: all weights", minimum=0
    )
    lora_alpha: float = setting(
        32.0, help="what adapters add is scaled by lora_alpha / lora_rank", minimum=0
    )
    lora_dropout: float = setting(0.0, help="dropout before the adapters", minimum=0, maximum=0.99)
    lora_targets: tuple[str, ...] = setting(
        ("all-linear",), help="linear layers with adapters, by the end of their names; all-linear"
    )
    passes_per_batch: int = setting(
        1, help="optimizer updates on each batch", minimum=1, maximum=64
    )
    algorithm: str = setting(
        "cispo",
        help="cispo, grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp, reinforce, ppo (critic), "
        "ppo_clip (none), or a loss of one's own: package.module:function",
    )
    loss_options: dict[str, float] = setting(  # noqa: RUF009
        {}, help="keyword arguments of a loss of one's own"
    )
    gae_lambda: float = setting(
        1.0, help="of PPO's critic: below 1 less variance, and its bias", minimum=0, maximum=1
    )
    value_coef: float = setting(0.5, help="weight of the critic's loss", minimum=0)
    value_clip: float = setting(0.2, help="how far a batch may move values; 0: any", minimum=0)
    value_rate_scale: float = setting(
        1.0, help="learning rate of the value head over that of the policy", minimum=0
    )
    ratio_cap: float = setting(
        DEFAULT_RATIO_CAP,
        help="CISPO's cap on the importance ratio itself: 1 + eps_high in the paper's terms",
        minimum=0,
    )
    clip_low: float = setting(
        0.0, help="ratios are clipped below 1 - this; 0: the algorithm's own", minimum=0
    )
    clip_high: float = setting(
        0.0, help="ratios are clipped above 1 + this; 0: the algorithm's own", minimum=0
    )
    dual_clip: float = setting(
        0.0, help="largest ratio that a negative advantage is multiplied with; 0: any", minimum=0
    )
    normalization: str = setting(
        "auto",
        help="token: mean over trained tokens; sequence: mean over samples of their token means; "
        "global: sum over samples times normalization_tokens; auto: the algorithm's own",
        choices=("auto", "token", "sequence", "global"),
    )
    normalization_tokens: int = setting(
        0, help="constant length of the global normalization; 0: the algorithm's own", minimum=0
    )
    old_logprobs: str = setting(
        "behavior",
        help="what ratios are taken against: the engine's log-probs, or the trainer's own, "
        "recomputed as the batch begins",
        choices=("behavior", "recomputed"),
    )
    weight_cap: float = setting(
        0.0,
        help="with recomputed log-probs: tokens weigh min(recomputed / engine's, this); 0: 1",
        minimum=0,
    )
    mask_ratio_low: float = setting(
        0.0, help="tokens with a ratio to the engine's probability below are left out", minimum=0
    )
    mask_ratio_high: float = setting(
        0.0, help="tokens with a ratio above are left out; 0: none is", minimum=0
    )
    mask_staleness: int = setting(
        0, help="tokens sampled more weight versions ago are left out; 0: none is", minimum=0
    )
    mask_kl_max: float = setting(
        0.0,
        help="samples further than this (mean log-ratio, nats) from the policy lose their tokens "
        "of negative advantage; 0: none does",
        minimum=0,
    )
    kl_coef: float = setting(
        0.0, help="weight of the KL penalty against the reference; 0: none is held", minimum=0
    )
    kl_estimator: str = setting(
        "k2", help="k1: taken off the advantages; k2, k3: added to the loss",
        choices=("k1", "k2", "k3"),
    )  # fmt: skip
    reference_path: str = setting(
        "", help="model directory of the reference; empty: model_path, the starting weights"
    )
    logprob_gap_alarm: float = setting(
        0.05,
        help="mean |log-prob of trainer - engine| over the freshest tokens above which each step "
        "logs a warning; 0: never",
        minimum=0,
    )
    balance_coef: float = setting(
        0.0, help="weight of the load-balance loss of a mixture of experts; 0: none", minimum=0
    )
    mtp_heads: int = setting(
        0, help="heads that draft tokens, trained beside the policy; 0: none", minimum=0, maximum=8
    )
    mtp_loss: str = setting(
        "topk_kl", help="of drafts: KL over the policy's likeliest tokens, total variation, or "
        "cross-entropy of the sampled tokens", choices=LOSSES,
    )  # fmt: skip
    mtp_top_k: int = setting(64, help="tokens that topk_kl looks at one by one", minimum=1)
    mtp_learning_rate: float = setting(
        1e-4, help="of the heads; follows the policy's warm-up and schedule", minimum=0
    )
    alpha: float = setting(0.2, help="weight of process rewards")
    beta: float = setting(0.1, help="weight of speed, added after the spread is divided by")
    speed_step: float = setting(
        0.05, help="speeds count in whole steps of this from their group's mean", minimum=1e-3,
        maximum=1,
    )  # fmt: skip
    nominal_tokens_per_s: float = setting(
        50.0, help="what sampling counts for in completion times, whatever the engine took",
        minimum=1e-3,
    )  # fmt: skip
    gamma: float = setting(1.0, help="discount per turn of later rewards", minimum=0, maximum=1)
    baseline: str = setting(
        "auto", help="what a return is compared with; auto: the algorithm's own",
        choices=("auto", "group_mean", "leave_one_out", "batch_mean", "none"),
    )  # fmt: skip
    normalize_std: str = setting(
        "auto", help="divide advantages by the spread of returns over this; auto: the algorithm's",
        choices=("auto", "none", "group", "batch", "domain"),
    )  # fmt: skip
    spread_floor: float = setting(
        SPREAD_FLOOR, help="a smaller spread of returns is taken as this", minimum=1e-6
    )
    domain_weights: dict[str, float] = setting(  # noqa: RUF009
        {}, help="factor on the advantages of a domain; 1 unless named", minimum=0
    )
    drop_flat_groups: bool = setting(
        False, help="leave out groups whose rollouts all earned the same but for speed (DAPO)"
    )
    patience_s: float = setting(
        600.0, help="how long an unreachable scheduler or pool is waited for", minimum=1
    )

    def __post_init__(self) -> None:
        """Raises `ConfigError` for an objective that cannot be, naming setting and value."""
        if self.learning_rate_schedule != "constant" and not self.max_steps:
            raise ConfigError(
                f"trainer: learning_rate_schedule = {self.learning_rate_schedule} is not allowed "
                "with max_steps = 0: it falls to the last step, so there has to be one"
            )
        if not self.eval_tasks and (self.eval_every_steps or self.eval_at_start):
            name = "eval_every_steps" if self.eval_every_steps else "eval_at_start"
            raise ConfigError(
                f"trainer: {name} = {getattr(self, name)} is not allowed without eval_tasks, the "
                "file of tasks to evaluate on"
            )
        try:
            Objective(self.objective())
            own_baseline = self.credit_rules().advantages.baseline
        except InvalidArgument as error:
            raise ConfigError(f"trainer: {error}") from error
        if preset(self.algorithm).critic:
            for name in ("baseline", "normalize_std"):
                if getattr(self, name) not in ("auto", "none"):
                    raise ConfigError(
                        f"trainer: {name} = {getattr(self, name)} is not allowed with algorithm = "
                        f"{self.algorithm}: its advantages are the critic's"
                    )
        if self.drop_flat_groups and own_baseline not in ("group_mean", "leave_one_out"):
            raise ConfigError(
                f"trainer: drop_flat_groups = True is not allowed: with baseline {own_baseline} a "
                "group that earned the same all over teaches something; use group_mean or "
                "leave_one_out"
            )

    def learner(self) -> LearnerConfig:
        """What concerns the optimizer step."""
        return LearnerConfig(
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            schedule=cast(Schedule, self.learning_rate_schedule),
            total_updates=self.max_steps * self.passes_per_batch,
            optimizer=OptimizerConfig(
                name=cast(OptimizerName, self.optimizer),
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
                loss=cast(MtpLoss, self.mtp_loss),
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
        baseline = own.baseline if self.baseline == "auto" else cast(Baseline, self.baseline)
        spread = own.spread if self.normalize_std == "auto" else cast(Spread, self.normalize_std)
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
