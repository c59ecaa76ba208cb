"""What an optimizer step is asked for and what it tells.

Owns the settings and the outcome; the step itself is `forge.rl.learner.learner`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.critic import CriticConfig, CriticStats
from forge.rl.losses import DomainStats, ObjectiveConfig, PolicyStats
from forge.rl.mtp import MtpConfig, MtpStats
from forge.rl.optimizers import OptimizerConfig

Schedule = Literal["constant", "linear", "cosine"]

FINAL_RATE_SHARE = 0.1
"""Of the learning rate, where a falling schedule ends."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    skipped: str
    """Why the weights were left alone; "" when they were updated."""
    stats: PolicyStats
    """Of the first pass, like loss and gradient norm: before this batch changed anything."""
    compute_s: float
    plan: BatchPlan
    """What was computed: not the plan given, if that did not fit into memory."""
    domains: Mapping[str, DomainStats] = field(default_factory=dict)
    """Of the first pass too."""
    critic: CriticStats = CriticStats()  # noqa: RUF009
    """Of the values as the batch began; zeros without a critic."""
    balance_loss: float = 0.0
    """Load-balance loss of the experts, as the batch began; not in `loss`. 0 without one."""
    mtp: MtpStats = MtpStats()  # noqa: RUF009
    """Of the heads as the batch began."""
    cut_short: str = ""
    """Why the batch's later passes were left out, after an update; "" when none was."""
    memory_retries: int = 0
    """How often the batch was begun anew in smaller trees, for want of memory."""
    shortage: str = ""
    """What the allocator said, the last time."""
