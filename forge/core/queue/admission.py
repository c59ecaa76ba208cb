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

UNBOUNDED = 2**53
"""W of a trainer that sees every group."""


class Admission(enum.Enum):
    RUNNING = "running"
    """Only running groups count against N: the most throughput, and staleness without a bound."""
    WINDOW = "window"
    """Running plus complete groups that are in no batch and not assigned to one count against N:
    generation is at most N groups ahead of what trainers took. Those near the head start all the
    same, whatever overtook them."""
    AHEAD = "ahead"
    """Only groups with a place below H + M start: generation is at most M positions ahead of the
    oldest group that no batch took, and what priorities gain."""


class Mode(enum.Enum):
    FIFO = "fifo"
    """A batch is the next groups of the queue, in order: nothing overtakes."""
    GREEDY = "greedy"
    """Whatever is complete may be trained on."""
    WINDOWED = "windowed"
    """Whatever is complete in [H, H+W) may be trained on."""
    ADAPTIVE = "adaptive"
    """The window, and how many groups run, follow bounds on staleness and shift."""


class PartialGroups(enum.Enum):
    """What becomes of a group one of whose rollouts failed by the task's own doing. It is never
    trained on with one missing, and a failure that no other attempt could change always ends it."""

    FILL = "fill"
    """The rollout is attempted again, up to `max_attempts`; then the group is dropped."""
    WAIT = "wait"
    """It is attempted again until it is there, and the head of the window waits with it."""
    DROP = "drop"
    """The group is tombstoned at once, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The rules of one generation queue."""

    concurrency: int
    """N: most groups that run at once."""
    mode: Mode = Mode.WINDOWED
    window: int = 0
    """W of the mode `windowed`: how many positions from the head a trainer sees; 0 means
    ceil(0.3 N)."""
    batch_groups: int = 8
    """What a trainer takes as a rule: W of the mode `fifo`, and what `adaptive` reckons with."""
    max_staleness_p99: float = 8.0
    """Of the mode `adaptive`, in optimizer steps."""
    max_shift_kl: float = 0.05
    """Of the mode `adaptive`."""
    admission: Admission = Admission.WINDOW
    ahead: int = 0
    """M of the policy `ahead`; 0 means N."""
    domain_shares: Mapping[str, float] = field(default_factory=dict)
    domain_limits: Mapping[str, int] = field(default_factory=dict)
    """Most groups of a domain that run at once; a domain at its limit is passed over."""
    rollout_lease_s: float = 30.0
    """Of a claim whose runner renews in time; a slow one gets more, see
    `forge.core.queue.renewals`."""
    rollout_timeout_s: float = 7200.0
    """Longest life of one attempt, renewed or not."""
    recheck_s: float = 2.0
    """How soon an expired claim whose fate is not settled is reported again."""
    partial_groups: PartialGroups = PartialGroups.FILL
    max_attempts: int = 3
    """Failures of the task itself."""
    max_losses: int = 32
    """Faults of the infrastructure that end attempts at one rollout while others are sealed: from
    so many on, the task is to blame, as one that uses up the memory of its runner's host."""
    retry_backoff_s: float = 1.0
    """Before the second attempt; doubles with each failure."""
    max_backoff_s: float = 60.0
    batch_lease_s: float = 300.0
    short_batch_after_s: float = 5.0
    """A queue that nothing was added to for this long counts as at its end: what is left may go
    out as a batch smaller than asked."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_attempts", "max_losses"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} = {getattr(self, name)} must be at least 1")

    @property
    def window_size(self) -> int:
        """Positions from the head that are visible at all times."""
        match self.mode:
            case Mode.FIFO:
                return self.batch_groups
            case Mode.GREEDY:
                return UNBOUNDED
            case Mode.WINDOWED:
                return self.window or math.ceil(0.3 * self.concurrency)
            case Mode.ADAPTIVE:
                return 0

    def backoff_s(self, failures: int) -> float:
        """Wait after this many failures of one rollout."""
        doublings = min(failures - 1, 32)
        return float(min(self.retry_backoff_s * 2.0**doublings, self.max_backoff_s))

    def admits(self, *, place: float, head: int, near: bool, running: int, unfetched: int) -> bool:
        """Whether the training group in that place may start, as long as fewer than N run. `near`:
        it is one of the first from the head, as many as W and N allow."""
        match self.admission:
            case Admission.RUNNING:
                return True
            case Admission.WINDOW:
                return near or running + unfetched < self.concurrency
            case Admission.AHEAD:
                return place < head + (self.ahead or self.concurrency)
