"""Settings of the generation queue, with their choices: mode, admission, partial groups.

At most N groups run under each admission; they differ in what else limits generation. Admission
does not limit what may be trained on: the window does.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from forge.core.errors import InvalidArgument

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
UNBOUNDED = 2**53
"""Window size that imposes no bound."""


class GenerationLimit(enum.Enum):
    """Limit on generation besides N."""

    RUNNING = "running"
    """Only running groups count against N: highest throughput, unbounded staleness."""
    WINDOW = "window"
    """Running groups, and complete ones that are not assigned to a batch, count against N:
    generation is at most N groups ahead of the trainers. Groups near the head are exempt."""
    AHEAD = "ahead"
    """Only groups with a place below H + M start: generation is at most M positions, plus the gain
    of priorities, ahead of the oldest group that no batch took."""


class Mode(enum.Enum):
    """Complete groups that may be trained."""

    FIFO = "fifo"
    """The next groups of the queue, in order."""
    GREEDY = "greedy"
    """All complete groups."""
    WINDOWED = "windowed"
    """Complete groups in [H, H+W)."""
    ADAPTIVE = "adaptive"
    """The window and the admission follow bounds on staleness and shift."""


class PartialGroups(enum.Enum):
    """Treatment of a group with a rollout that failed through the task itself. An incomplete group
    is never trained on, and a permanent failure always tombstones its group."""

    FILL = "fill"
    """The rollout is attempted again, up to `max_attempts`; then the group is tombstoned."""
    WAIT = "wait"
    """The rollout is attempted until it succeeds; the head of the window waits for it."""
    DROP = "drop"
    """The group is tombstoned at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Rules of one generation queue."""

    concurrency: Positive = 32
    """N: most groups that run at once."""
    mode: Mode = Mode.WINDOWED
    """Groups that a trainer may take: fifo (the next ones, in order), greedy (all complete ones),
    windowed (complete ones in [H, H+W)), adaptive (a window and an admission that follow
    max_staleness_p99 and max_shift_kl)."""
    window: Annotated[int, Meta(ge=0)] = 0
    """W of mode = windowed: positions from the head that a trainer sees; 0: ceil(0.3 N)."""
    max_staleness_p99: Annotated[float, Meta(ge=1)] = 8.0
    """mode = adaptive: bound on staleness; 99 of 100 groups are trained within this number of
    optimizer steps after their start."""
    max_shift_kl: NotNegative = 0.05
    """mode = adaptive: bound on shift, the divergence beyond chance of the mix of a batch
    (duration, domain, difficulty) from that of the queue. It holds as long as waiting can reduce
    the shift."""
    admission: GenerationLimit = GenerationLimit.WINDOW
    """Limit on generation besides N running groups: running (none), window (complete groups that
    are not assigned to a batch count against N), ahead (only groups less than `ahead` positions
    from the head start); mode = adaptive has a rule of its own."""
    ahead: Annotated[int, Meta(ge=0)] = 0
    """M of admission = ahead; 0: N."""
    batch_groups: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Groups of a batch unless the trainer asks for another number; W of mode = fifo."""
    domain_shares: Mapping[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    """Share of each domain in every batch; empty: queue order alone."""
    domain_limits: Mapping[str, Positive] = field(default_factory=dict)
    """Most groups of a domain that run at once; the scheduler skips a domain at its limit."""
    rollout_lease_s: Annotated[float, Meta(ge=1)] = 20.0
    """Time from the last renewal of a task lease to its end; longer for a runner whose renewals
    come late."""
    rollout_timeout_s: Annotated[float, Meta(ge=1)] = 7200.0
    """Longest time of one attempt, even if its lease is renewed."""
    partial_groups: PartialGroups = PartialGroups.FILL
    """Treatment of a group with a rollout that failed through the task itself: fill (attempt the
    rollout again, up to max_attempts, then tombstone the group), wait (attempt it until it
    succeeds), drop (tombstone the group at once)."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """partial_groups = fill: most failures of the task itself in one rollout; then the scheduler
    tombstones the group. Failures of the infrastructure do not count."""
    max_losses: Annotated[int, Meta(ge=1, le=1000)] = 32
    """Most attempts at one rollout that the infrastructure ended while other rollouts were sealed;
    then the scheduler tombstones the group: its task may kill the runners."""
    retry_backoff_s: NotNegative = 1.0
    """Wait before the second attempt; doubles with each failure."""
    max_backoff_s: NotNegative = 60.0
    """Longest wait between attempts."""
    batch_lease_s: Annotated[float, Meta(ge=1)] = 300.0
    """Time from the last renewal of a batch lease to its end."""
    short_batch_after_s: NotNegative = 5.0
    """Time without a new task after which the queue counts as ended: the remaining groups may then
    form a smaller batch than requested."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_attempts", "max_losses"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} = {getattr(self, name)} must be at least 1")

    @property
    def window_size(self) -> int:
        """W, unless the mode is adaptive."""
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
        """Back-off after this many failures of one rollout."""
        doublings = min(failures - 1, 32)
        return float(min(self.retry_backoff_s * 2.0**doublings, self.max_backoff_s))
