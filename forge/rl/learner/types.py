"""The result of a step of `forge.rl.learner.learner`, and of each of its updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.critic import CriticStats
from forge.rl.learner.share import Frozen, Share
from forge.rl.losses.stats import DomainStats, EngineStats, PolicyStats, TokenStats
from forge.rl.losses.token_values import TokenValues
from forge.rl.model.replay import ReplayStats
from forge.rl.mtp.training import MtpStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one step."""

    loss: float
    grad_norm: float
    """Before clipping."""
    skipped: str
    """Reason why the weights were not updated; "" when they were."""
    stats: PolicyStats
    """Statistics of the first pass, of each mini-batch before its update; so are loss and gradient
    norm, which are means over mini-batches."""
    compute_s: float
    plan: BatchPlan
    """The computed plan: another than the given one if that did not fit into memory."""
    domains: Mapping[str, DomainStats] = field(default_factory=dict)
    """Statistics of the first pass by domain."""
    engines: Mapping[str, EngineStats] = field(default_factory=dict)
    """Statistics of the first pass by engine of inference."""
    critic: CriticStats = CriticStats()  # noqa: RUF009
    """Statistics of the values before the first update; zeros without a critic."""
    balance_loss: float = 0.0
    """Load-balance loss of the experts, not part of `loss`; 0 without one."""
    mtp: MtpStats = MtpStats()  # noqa: RUF009
    """Statistics of the draft heads in the first pass."""
    updates: int = 0
    """Updates of the weights: mini-batches times update passes, unless cut short."""
    cut_short: str = ""
    """Reason why later updates of the batch were left out; "" when none was."""
    memory_retries: int = 0
    """Retries of the batch in smaller trees after memory ran out."""
    shortage: str = ""
    """Error of the allocator at the last shortage."""
    empty_passes: int = 0
    """Passes without effect, over all data groups: so that each runs the same number."""
    replay: ReplayStats = ReplayStats()  # noqa: RUF009
    """Replay of recorded experts in the first pass; zeros without it."""
    imbalance: float = 0.0
    """Time that data groups wait for each other, as a share of the time that they compute; by the
    work of their trees."""
    token_values: TokenValues = TokenValues()  # noqa: RUF009
    """Values of the samples that the caller named, in the first pass; on rank 0."""


@dataclass(slots=True, kw_only=True)
class Update:
    """One update of a batch: its gradient is on the parameters unless `failed`."""

    plan: BatchPlan
    loss: float = 0.0
    grad_norm: float = 0.0
    share: Share = Share(trees=())  # noqa: RUF009
    stats: list[TokenStats] = field(default_factory=list)
    balance_loss: float = 0.0
    mtp: MtpStats = MtpStats()  # noqa: RUF009
    replay: ReplayStats = ReplayStats()  # noqa: RUF009
    frozen: list[Frozen] = field(default_factory=list)
    retries: int = 0
    shortage: str = ""
    failed: str = ""
    """Reason why there is no gradient; "" if there is one."""
