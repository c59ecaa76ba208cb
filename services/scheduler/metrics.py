"""The queue on /metrics: H, W, N, the books and the window."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge
from forge.v1 import scheduler_pb2
from services.scheduler.validation import ACTIVITIES

_LEADING = gauge("forge_scheduler_leading", "1 on the leader, 0 on a standby.")
_HEAD = gauge(
    "forge_scheduler_head",
    "H: lowest queue index whose group is neither consumed, nor in a batch or assigned to one.",
)
_WINDOW = gauge("forge_scheduler_window_groups", "W: positions that a trainer sees.")
_CONCURRENCY = gauge("forge_scheduler_concurrency_groups", "N: most groups that run at once.")
_RUNNING_LIMIT = gauge(
    "forge_scheduler_running_limit_groups", "Training groups that may run now: N, or less."
)
_STALENESS = gauge(
    "forge_scheduler_staleness_p99_steps", "Start to training; of the adaptive mode."
)
_SHIFT = gauge(
    "forge_scheduler_shift_kl", "Of the last batch the adaptive mode weighed from the queue."
)
_ACTIVITY = gauge(
    "forge_scheduler_activity", "1 for what an operator set: running, paused, draining.", ["state"]
)
_SKIPPED = gauge(
    "forge_scheduler_skipped_groups", "Tombstoned since all rollouts have the same outcome."
)
_SURPLUS = gauge(
    "forge_scheduler_surplus_rollouts", "Sealed after another attempt, or too late for the group."
)
_GROUPS = gauge(
    "forge_scheduler_groups",
    "The books: accepted = trained + tombstoned + pending. Of the pending: queued, running, "
    "complete inside the window and outside it.",
    ["state"],
)
_ROLLOUTS = gauge("forge_scheduler_running_rollouts", "Attempts that are with runners.")
_EVAL_PENDING = gauge("forge_scheduler_eval_pending_groups", "Evaluation groups to finish.")
_COMPLETED = gauge(
    "forge_scheduler_completed_rollouts", "Training rollouts completed, by domain.", ["domain"]
)
_REWARD = gauge(
    "forge_scheduler_recent_reward_ratio", "Mean outcome of the last rollouts.", ["domain"]
)
_UNTRAINED = gauge(
    "forge_scheduler_untrained_seconds",
    "Since a batch was committed or an evaluation group ended.",
)
_AWAY = gauge("forge_scheduler_shards_away", "Pool shards that may hold groups and do not answer.")
FAILURES = counter(
    "forge_scheduler_failures_total",
    "Attempts that failed, by whose failure it was: task or infrastructure.",
    ["kind"],
)
TOMBSTONES = counter("forge_scheduler_tombstones_total", "Groups given up.")
TERMS = counter("forge_scheduler_terms_total", "Times this instance became the leader.")

_STATES = (
    "accepted",
    "trained",
    "tombstoned",
    "pending",
    "queued",
    "running_groups",
    "complete_in_window",
    "complete_outside_window",
)


def show_leading(leading: bool) -> None:
    _LEADING.set(leading)
    if leading:
        TERMS.inc()


def clear() -> None:
    """The queue is another instance's now: two of them would be one too many in every sum."""
    show(scheduler_pb2.GetSchedulerStatusResponse())
    _COMPLETED.clear()
    _REWARD.clear()


def show(status: scheduler_pb2.GetSchedulerStatusResponse) -> None:
    """What GetSchedulerStatus answers, as gauges."""
    _HEAD.set(status.head)
    _WINDOW.set(status.window)
    _CONCURRENCY.set(status.concurrency)
    _RUNNING_LIMIT.set(status.running_limit)
    _STALENESS.set(status.staleness_p99)
    _SHIFT.set(status.shift_kl)
    _SKIPPED.set(status.skipped)
    _SURPLUS.set(status.surplus)
    _UNTRAINED.set(status.untrained_s)
    _AWAY.set(len(status.shards_away))
    for number, activity in ACTIVITIES.items():
        _ACTIVITY.labels(activity.value).set(status.activity == number)
    for state in _STATES:
        _GROUPS.labels(state.removesuffix("_groups")).set(getattr(status, state))
    _ROLLOUTS.set(status.running_rollouts)
    _EVAL_PENDING.set(status.eval_pending)
    for domain in status.domains:
        _COMPLETED.labels(domain.domain).set(domain.completed_rollouts)
        _REWARD.labels(domain.domain).set(domain.recent_reward)
