"""The outcome of an optimizer step; the step itself is `forge.rl.learner.learner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.critic import CriticStats
from forge.rl.losses import DomainStats, PolicyStats
from forge.rl.mtp import MtpStats


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
