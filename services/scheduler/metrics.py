"""The queue on /metrics: H, W, N and the counts of groups."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge
from forge.v1 import scheduler_pb2
from services.scheduler.validation import ACTIVITIES

_LEADING = gauge("forge_scheduler_leading", "1 on the leader, 0 on a standby.")
_HEAD = gauge(
    "forge_scheduler_head",
    "H: lowest queue index whose group is not consumed, in a batch or assigned to one.",
)
_WINDOW = gauge("forge_scheduler_window_groups", "W: positions that a trainer sees.")
_CONCURRENCY = gauge("forge_scheduler_concurrency_groups", "N: most groups that run at once.")
_RUNNING_LIMIT = gauge(
    "forge_scheduler_running_limit_groups", "Most training groups that may run now; at most N."
)
_STALENESS = gauge(
    "forge_scheduler_staleness_p99_steps",
    "Adaptive mode: staleness of recently trained groups, 99th percentile.",
)
_SHIFT = gauge(
    "forge_scheduler_shift_kl",
    "Adaptive mode: divergence of the last weighed batch from the queue.",
)
_ACTIVITY = gauge(
    "forge_scheduler_activity",
    "1 for the activity that an operator set: running, paused, draining.",
    ["state"],
)
_SKIPPED = gauge(
    "forge_scheduler_skipped_groups",
    "Groups tombstoned because all rollouts have the same outcome.",
)
_SURPLUS = gauge(
    "forge_scheduler_surplus_rollouts",
    "Rollouts sealed after another attempt, or after the group was settled.",
)
_GROUPS = gauge(
    "forge_scheduler_groups",
    "Training groups by state: accepted = trained + tombstoned + pending; queued, running and "
    "complete groups are pending.",
    ["state"],
)
_ROLLOUTS = gauge("forge_scheduler_running_rollouts", "Attempts leased to runners.")
_EVAL_PENDING = gauge(
    "forge_scheduler_eval_pending_groups", "Evaluation groups that are not finished."
)
_COMPLETED = gauge(
    "forge_scheduler_completed_rollouts", "Training rollouts completed, by domain.", ["domain"]
)
_REWARD = gauge(
    "forge_scheduler_recent_reward_ratio", "Mean outcome of recent rollouts, by domain.", ["domain"]
)
_UNTRAINED = gauge(
    "forge_scheduler_untrained_seconds",
    "Time since a batch was committed or an evaluation group finished.",
)
_AWAY = gauge("forge_scheduler_shards_away", "Unreachable pool shards that may hold groups.")
FAILURES = counter(
    "forge_scheduler_failures_total",
    "Failed attempts, by cause: task or infrastructure.",
    ["kind"],
)
TOMBSTONES = counter("forge_scheduler_tombstones_total", "Groups tombstoned.")
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
    """Leadership of this instance, and the count of its terms."""
    _LEADING.set(leading)
    if leading:
        TERMS.inc()


def clear() -> None:
    """Zero the gauges at the end of a term, so that sums over instances count one leader."""
    show(scheduler_pb2.GetSchedulerStatusResponse())
    _COMPLETED.clear()
    _REWARD.clear()


def show(status: scheduler_pb2.GetSchedulerStatusResponse) -> None:
    """The answer of GetSchedulerStatus, as gauges."""
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
