"""Settings of the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from forge.core.errors import ConfigError
from forge.core.queue.admission import Admission, Mode, PartialGroups, QueueSettings
from forge.runtime.config import ServiceConfig, setting

_BOUNDS = frozenset({"max_staleness_p99", "max_shift_kl"})
IGNORED: Mapping[Mode, frozenset[str]] = {
    Mode.FIFO: _BOUNDS | {"window", "domain_shares"},
    Mode.GREEDY: _BOUNDS | {"window"},
    Mode.WINDOWED: _BOUNDS,
    Mode.ADAPTIVE: frozenset({"window", "admission", "ahead", "domain_shares"}),
}
"""Settings that mean nothing in a mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """The windowed FIFO over groups: one leader serves, any number stand by."""

    concurrency: int = setting(32, help="N: most groups that run at once", minimum=1)
    mode: str = setting(
        Mode.WINDOWED.value,
        help="what a trainer may have: fifo (the next groups, in order), greedy (whatever is "
        "complete), windowed (what is complete in [H, H+W)), adaptive (a window and an admission "
        "that follow max_staleness_p99 and max_shift_kl)",
        choices=tuple(mode.value for mode in Mode),
    )
    window: int = setting(
        0,
        help="W of mode = windowed: positions from the head that a trainer sees; 0: ceil(0.3 N)",
        minimum=0,
    )
    max_staleness_p99: float = setting(
        8.0,
        help="mode = adaptive: 99 of 100 groups are trained on at most so many optimizer steps "
        "after they were started",
        minimum=1,
    )
    max_shift_kl: float = setting(
        0.05,
        help="mode = adaptive: how far the mix of a batch (duration, domain, difficulty) may be "
        "from the queue's, as a divergence beyond that of chance, while waiting can help",
        minimum=0,
    )
    admission: str = setting(
        Admission.WINDOW.value,
        help="what holds generation back besides N running groups: running (nothing more), "
        "window (complete groups not assigned to a batch count against N), ahead (only groups "
        "less than `ahead` positions from the head start); mode = adaptive has a rule of its own",
        choices=tuple(policy.value for policy in Admission),
    )
    ahead: int = setting(0, help="M of admission = ahead; 0: N", minimum=0)
    batch_groups: int = setting(
        8, help="groups in a batch unless the trainer asks for others", minimum=1, maximum=4096
    )
    domain_shares: dict[str, float] = setting(  # noqa: RUF009
        {}, help="share of each domain in every batch; empty: queue order alone", minimum=0
    )
    domain_limits: dict[str, float] = setting(  # noqa: RUF009
        {}, help="most groups of a domain that run at once; others are not held up", minimum=1
    )
    domain_context_tokens: dict[str, float] = setting(  # noqa: RUF009
        {},
        help="longest context of a domain's sessions, prompt and answer, where the model's is "
        "longer; the gateway keeps to it",
        minimum=1,
    )
    skip_equal_rewards: bool = setting(
        False,
        help="give a training group up when all its rollouts have the same outcome, whatever their "
        "process rewards and speeds",
    )
    rollout_lease_s: float = setting(
        20.0,
        help="a runner's claim ends this long after its last renewal, and later where renewals of "
        "that runner come late",
        minimum=1,
    )
    rollout_timeout_s: float = setting(
        7200.0, help="longest life of one attempt, renewed or not", minimum=1
    )
    takeover_hold_s: float = setting(
        2.0,
        help="how long a new leader hands no rollout out, so that runners, which renew with each "
        "new leader at once, keep what they hold",
        minimum=0,
    )
    partial_groups: str = setting(
        PartialGroups.FILL.value,
        help="what becomes of a group one of whose rollouts failed by the task's own doing: fill "
        "(attempted again, up to max_attempts, then dropped), wait (attempted again until it is "
        "there), drop (tombstoned at once)",
        choices=tuple(policy.value for policy in PartialGroups),
    )
    max_attempts: int = setting(
        3,
        help="partial_groups = fill: failures of the task itself, in one rollout, before its group "
        "is given up; faults of the infrastructure do not count",
        minimum=1,
        maximum=100,
    )
    max_losses: int = setting(
        32,
        help="attempts at one rollout that the infrastructure ended while other rollouts were "
        "sealed, before its group is given up: the bound on a task that kills its runners",
        minimum=1,
        maximum=1000,
    )
    retry_backoff_s: float = setting(
        1.0, help="wait before the second attempt; doubles with each failure", minimum=0
    )
    max_backoff_s: float = setting(60.0, help="longest wait between attempts", minimum=0)
    batch_lease_s: float = setting(
        300.0, help="a trainer's claim ends this long after its last renewal", minimum=1
    )
    short_batch_after_s: float = setting(
        5.0,
        help="a queue that got no task for this long counts as at its end: what is left may go "
        "out as a batch smaller than asked",
        minimum=0,
    )
    stall_after_s: float = setting(
        120.0,
        help="nothing trained on for so long: the status and the log say why, and what to do",
        minimum=1,
    )
    session_ttl_s: float = setting(10_800.0, help="how long a session token is good for", minimum=1)
    max_queued_groups: int = setting(
        1_000_000, help="most groups accepted and not yet consumed", minimum=1
    )
    max_group_size: int = setting(1024, help="most rollouts of one task", minimum=1, maximum=65_536)
    max_wait_s: float = setting(
        30.0, help="longest time a call waits for rollouts or a batch", minimum=0, maximum=600
    )
    pool_timeout_s: float = setting(
        5.0, help="how long one attempt at a call to a pool shard may take", minimum=0.1
    )
    shard_wait_s: float = setting(
        10.0,
        help="how long a new leader waits for a pool shard that is away; then it begins without it",
        minimum=0,
        maximum=3600,
    )
    lost_shards: tuple[str, ...] = setting(
        (), help="pool shards whose disks are gone for good: a new leader awaits them no more"
    )

    def queue_settings(self) -> QueueSettings:
        """The rules of the generation queue. Raises ConfigError."""
        self._refuse_what_is_ignored()
        for domain, share in self.domain_shares.items():
            if not share > 0:
                raise ConfigError(f"domain_shares: {domain} = {share!r} must be above 0")
        for name, limits in (
            ("domain_limits", self.domain_limits),
            ("domain_context_tokens", self.domain_context_tokens),
        ):
            for domain, limit in limits.items():
                if limit != int(limit):
                    raise ConfigError(f"{name}: {domain} = {limit!r} must be a whole number")
        if self.session_ttl_s < self.rollout_timeout_s:
            raise ConfigError(
                f"session_ttl_s = {self.session_ttl_s:g} must be at least rollout_timeout_s = "
                f"{self.rollout_timeout_s:g}: the gateway would refuse a rollout before its end"
            )
        return QueueSettings(
            concurrency=self.concurrency,
            mode=Mode(self.mode),
            batch_groups=self.batch_groups,
            max_staleness_p99=self.max_staleness_p99,
            max_shift_kl=self.max_shift_kl,
            window=self.window,
            admission=Admission(self.admission),
            ahead=self.ahead,
            domain_shares=self.domain_shares,
            domain_limits={domain: int(limit) for domain, limit in self.domain_limits.items()},
            rollout_lease_s=self.rollout_lease_s,
            rollout_timeout_s=self.rollout_timeout_s,
            partial_groups=PartialGroups(self.partial_groups),
            max_attempts=self.max_attempts,
            max_losses=self.max_losses,
            retry_backoff_s=self.retry_backoff_s,
            max_backoff_s=self.max_backoff_s,
            batch_lease_s=self.batch_lease_s,
            short_batch_after_s=self.short_batch_after_s,
        )

    def _refuse_what_is_ignored(self) -> None:
        """A setting that differs from its default and changes nothing is a mistake."""
        ignored = dict.fromkeys(IGNORED[Mode(self.mode)], f"mode = {self.mode}")
        if self.admission != Admission.AHEAD.value:
            ignored.setdefault("ahead", f"admission = {self.admission}")
        if self.partial_groups != PartialGroups.FILL.value:
            ignored["max_attempts"] = f"partial_groups = {self.partial_groups}"
        if self.partial_groups == PartialGroups.WAIT.value:
            ignored["max_losses"] = f"partial_groups = {self.partial_groups}"
        for key in dataclasses.fields(self):
            value, without = getattr(self, key.name), ignored.get(key.name)
            if without and value not in (key.default, {}):
                raise ConfigError(
                    f"{key.name} = {value!r} means nothing with {without}: leave it out"
                )
