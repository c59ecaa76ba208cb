"""Settings of the trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import cast

from forge.core.advantages import Baseline
from forge.core.rewards import RewardWeights
from forge.rl.learner import LearnerConfig
from forge.rl.losses import DEFAULT_RATIO_CAP
from forge.runtime.config import ServiceConfig, setting
from services.trainer.samples import CreditRules


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(ServiceConfig):
    """The learner: pulls batches from the scheduler, pushes weights to inference."""

    model_path: str = setting("", help="model directory, transformers layout: starting weights")
    checkpoint_dir: str = setting(".forge/checkpoints", help="directory of the checkpoints")
    checkpoint_every_steps: int = setting(
        10, help="optimizer steps between checkpoints: what a crash can cost", minimum=1
    )
    max_steps: int = setting(0, help="optimizer steps to train for; 0: no end", minimum=0)
    batch_groups: int = setting(
        0, help="groups in a batch; 0: the scheduler's setting", minimum=0, maximum=4096
    )
    seed: int = setting(0, help="seed of everything random in the trainer", minimum=0)
    metrics_file: str = setting("", help="file to append each step's metrics to; empty: none")
    torch_threads: int = setting(
        0, help="threads of the tensor library; 0: half the cores, inference has the rest",
        minimum=0,
    )  # fmt: skip
    autocast: str = setting(
        "none", help="type of the model's trunk; master weights and the head are float32",
        choices=("none", "bfloat16"),
    )  # fmt: skip
    publish_dtype: str = setting(
        "float32", help="type of the weights sent to inference",
        choices=("float32", "bfloat16", "float16"),
    )  # fmt: skip
    token_budget: int = setting(
        16384, help="most tokens in one forward pass; more accumulate gradients", minimum=1
    )
    learning_rate: float = setting(1e-5, help="of AdamW, after the warm-up", minimum=0)
    warmup_steps: int = setting(0, help="steps of linear learning-rate warm-up", minimum=0)
    adam_beta1: float = setting(0.9, help="decay of the gradient mean", minimum=0, maximum=0.9999)
    adam_beta2: float = setting(
        0.95, help="decay of the gradient square", minimum=0, maximum=0.999999
    )
    weight_decay: float = setting(0.0, help="decoupled weight decay", minimum=0)
    grad_clip: float = setting(1.0, help="largest gradient norm", minimum=1e-9)
    ratio_cap: float = setting(
        DEFAULT_RATIO_CAP,
        help="CISPO's cap on the importance ratio itself: 1 + eps_high in the paper's terms",
        minimum=0,
    )
    alpha: float = setting(0.2, help="weight of process rewards")
    beta: float = setting(0.1, help="weight of the speed reward")
    gamma: float = setting(1.0, help="discount per turn of later rewards", minimum=0, maximum=1)
    baseline: str = setting(
        "group_mean", help="what a return is compared with",
        choices=("group_mean", "leave_one_out", "none"),
    )  # fmt: skip
    normalize_std: bool = setting(
        False, help="divide advantages by the spread of their group's returns"
    )
    patience_s: float = setting(
        600.0, help="how long an unreachable scheduler or pool is waited for", minimum=1
    )

    def learner(self) -> LearnerConfig:
        """What concerns the optimizer step."""
        return LearnerConfig(
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            adam_betas=(self.adam_beta1, self.adam_beta2),
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
            ratio_cap=self.ratio_cap,
            token_budget=self.token_budget,
        )

    def credit_rules(self) -> CreditRules:
        """What concerns rewards and advantages."""
        return CreditRules(
            weights=RewardWeights(alpha=self.alpha, beta=self.beta, gamma=self.gamma),
            baseline=cast(Baseline, self.baseline),
            normalize_std=self.normalize_std,
        )

    def threads(self) -> int:
        """Intra-operation threads to use."""
        return self.torch_threads or max(1, (os.cpu_count() or 2) // 2)
