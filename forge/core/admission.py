"""When the next training group may start: the named policies, and the settings of the queue.

Owns the rule alone. It has no part in what may be trained on: that is the window's, whatever the
policy. At most N groups run under each; they differ in what else holds generation back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.core.errors import InvalidArgument


class Admission(enum.Enum):
    RUNNING = "running"
    """Only running groups count against N: the most throughput, and staleness without a bound."""
    WINDOW = "window"
    """Running plus complete groups that no trainer took count against N: generation is at most N
    groups ahead of training."""
    AHEAD = "ahead"
    """Only groups with an index below H + M start: generation is at most M positions ahead of
    the oldest group that is not consumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The rules of one generation queue."""

    concurrency: int
    """N: most groups that run at once."""
    window: int = 0
    """W: how many positions from the head a trainer sees; 0 means ceil(0.3 N)."""
    admission: Admission = Admission.WINDOW
    ahead: int = 0
    """M of the policy `ahead`; 0 means N."""
    domain_shares: Mapping[str, float] = field(default_factory=dict)
    rollout_lease_s: float = 30.0
    rollout_timeout_s: float = 7200.0
    """Longest life of one attempt, renewed or not."""
    recheck_s: float = 2.0
    """How soon an expired claim whose fate is not settled is reported again."""
    max_attempts: int = 3
    retry_backoff_s: float = 1.0
    """Before the second attempt; doubles with each failure."""
    max_backoff_s: float = 60.0
    batch_lease_s: float = 300.0
    short_batch_after_s: float = 5.0
    """A queue that nothing was added to for this long counts as at its end: what is left may go
    out as a batch smaller than asked."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_attempts"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} = {getattr(self, name)} must be at least 1")

    @property
    def window_size(self) -> int:
        return self.window or math.ceil(0.3 * self.concurrency)

    def backoff_s(self, failures: int) -> float:
        """Wait after this many failures of one rollout."""
        doublings = min(failures - 1, 32)
        return float(min(self.retry_backoff_s * 2.0**doublings, self.max_backoff_s))

    def admits(self, *, index: int, head: int, running: int, unfetched: int) -> bool:
        """Whether the training group at `index` may start, as long as fewer than N run."""
        match self.admission:
            case Admission.RUNNING:
                return True
            case Admission.WINDOW:
                return running + unfetched < self.concurrency
            case Admission.AHEAD:
                return index < head + (self.ahead or self.concurrency)
