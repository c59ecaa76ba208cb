"""The result of an optimizer step of `forge.rl.learner.learner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.critic import CriticStats
from forge.rl.losses.stats import DomainStats, PolicyStats
from forge.rl.mtp.training import MtpStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one step."""

    loss: float
    grad_norm: float
    """Before clipping."""
    skipped: str
    """Why the weights were not updated; "" when they were."""
    stats: PolicyStats
    """Statistics of the first epoch, before any update, like loss and gradient norm."""
    compute_s: float
    plan: BatchPlan
    """The computed plan: another than the given one if that did not fit into memory."""
    domains: Mapping[str, DomainStats] = field(default_factory=dict)
    """Statistics of the first epoch by domain."""
    critic: CriticStats = CriticStats()  # noqa: RUF009
    """Statistics of the values before the update; zeros without a critic."""
    balance_loss: float = 0.0
    """Load-balance loss of the experts before the update, not part of `loss`; 0 without one."""
    mtp: MtpStats = MtpStats()  # noqa: RUF009
    """Statistics of the draft heads before the update."""
    cut_short: str = ""
    """Why later epochs of the batch were left out; "" when none was."""
    memory_retries: int = 0
    """Retries of the batch in smaller trees after memory ran out."""
    shortage: str = ""
    """Error of the allocator at the last shortage."""
    empty_passes: int = 0
    """Passes without effect, over all data groups: so that each runs the same number."""
    imbalance: float = 0.0
    """Time that data groups wait for each other, as a share of the time that they compute; by the
    work of their trees."""
