"""Metrics of the queue: H, W, N and the counts of groups."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge
from forge.v1 import scheduler_pb2
from services.scheduler.validation import ACTIVITIES

_LEADING = gauge("forge_scheduler_leading", "1 on the leader, 0 on a standby.")
_FIELDS = {
    "head": gauge(
        "forge_scheduler_head",
        "H: lowest queue index whose group is neither consumed, nor in a batch, nor assigned to "
        "one.",
    ),
    "window": gauge("forge_scheduler_window_groups", "W: positions that a trainer sees."),
    "concurrency": gauge("forge_scheduler_concurrency_groups", "N: most groups that run at once."),
    "running_limit": gauge(
        "forge_scheduler_running_limit_groups", "Most training groups that may run now; at most N."
    ),
    "staleness_p99": gauge(
        "forge_scheduler_staleness_p99_steps",
        "Adaptive mode: staleness of recently trained groups, 99th percentile.",
    ),
    "shift_kl": gauge(
        "forge_scheduler_shift_kl",
        "Adaptive mode: divergence of the last weighed batch from the queue.",
    ),
    "skipped": gauge(
        "forge_scheduler_skipped_groups",
        "Groups tombstoned because all rollouts have the same outcome.",
    ),
    "surplus": gauge(
        "forge_scheduler_surplus_rollouts",
        "Rollouts sealed after another attempt, or after the group was settled.",
    ),
    "running_rollouts": gauge("forge_scheduler_running_rollouts", "Attempts leased to runners."),
    "eval_pending": gauge(
        "forge_scheduler_eval_pending_groups", "Evaluation groups that are not finished."
    ),
    "untrained_s": gauge(
        "forge_scheduler_untrained_seconds",
        "Time since the last progress: a committed batch, a finished evaluation group, or the "
        "first group of an empty queue.",
    ),
}
"""By field of the status."""
GROUPS_TO_MOVE = gauge(
    "forge_scheduler_groups_to_move", "Groups on pool shards that retire; 0 when none does."
)
MOVED_GROUPS = counter(
    "forge_scheduler_moved_groups_total", "Groups moved from pool shards that retire."
)
_ACTIVITY = gauge(
    "forge_scheduler_activity",
    "1 for the activity that an operator set: running, paused, draining.",
    ["state"],
)
_GROUPS = gauge(
    "forge_scheduler_groups",
    "Training groups by state: accepted = trained + tombstoned + pending; queued, running and "
    "complete groups are pending.",
    ["state"],
)
_COMPLETED = gauge(
    "forge_scheduler_completed_rollouts", "Training rollouts completed, by domain.", ["domain"]
)
_REWARD = gauge(
    "forge_scheduler_recent_reward_ratio", "Mean outcome of recent rollouts, by domain.", ["domain"]
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
    for field, metric in _FIELDS.items():
        metric.set(getattr(status, field))
    _AWAY.set(len(status.shards_away))
    for number, activity in ACTIVITIES.items():
        _ACTIVITY.labels(activity.value).set(status.activity == number)
    for state in _STATES:
        _GROUPS.labels(state.removesuffix("_groups")).set(getattr(status, state))
    for domain in status.domains:
        _COMPLETED.labels(domain.domain).set(domain.completed_rollouts)
        _REWARD.labels(domain.domain).set(domain.recent_reward)
