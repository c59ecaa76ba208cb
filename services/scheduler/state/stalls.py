"""Stalls: the cause of a long time without training, and a remedy.

Owns the events since the last progress (`Watch`), and the one conversion of facts into a cause and
a text (`why`), which GetSchedulerStatus, `forge run` and the log show. Times come from the queue's
clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from forge.core.queue.activity import Activity
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Phase, RolloutPhase

HEARD_S = 60.0
"""A runner or trainer without a call for this long counts as absent: each calls or renews at least
every 30 s (`max_wait_s`)."""
REASON_CHARS = 200
KEPT_REASONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A cause, and a text with a remedy."""

    cause: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The group at the head of the window, while it runs."""

    task_id: str
    index: int
    open_rollouts: int
    failures: int
    """Failures of these rollouts that count against the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The queue at one moment; numbers count groups unless noted otherwise."""

    idle_s: float
    """Since a batch was committed or an evaluation group finished."""
    activity: Activity = Activity.RUNNING
    waiting: int = 0
    """Pending groups of both purposes."""
    queued: int = 0
    running: int = 0
    complete_in_window: int = 0
    assigned: int = 0
    """Groups of these that are assigned to the open batch."""
    complete_outside_window: int = 0
    rollouts: int = 0
    """Leased attempts."""
    runner_silent_s: float = 0.0
    trainer_silent_s: float = 0.0
    batch: tuple[str, str, float] | None = None
    """Trainer, batch id and age in seconds of a leased batch."""
    away: frozenset[str] = frozenset()
    """Unreachable pool shards."""
    tombstoned: int = 0
    """Since the last progress, like the fields below."""
    tombstone_reason: str = ""
    faults: int = 0
    """Attempts that the infrastructure ended."""
    fault_reason: str = ""
    head: Head | None = None


def head_of(queue: GenerationQueue) -> Head | None:
    """The group at the head, if it runs."""
    group = queue.window.head_group
    if group is None or group.phase is not Phase.RUNNING:
        return None
    unsealed = [each for each in group.rollouts if each.phase is not RolloutPhase.SEALED]
    return Head(
        task_id=group.spec.task_id,
        index=group.spec.index,
        open_rollouts=len(unsealed),
        failures=sum(each.failures for each in unsealed),
    )


class Watch:
    """Events since the last progress."""

    def __init__(self) -> None:
        self._progress_s: float | None = None
        self._runner_s: float | None = None
        self._trainer_s: float | None = None
        self._batch: tuple[str, str, float] | None = None
        self._tombstones: Counter[str] = Counter()
        self._faults = 0
        self._fault_reason = ""
        self.all_faults = 0
        """Faults of the term."""

    def began(self, now_s: float) -> None:
        """The term began; runners and trainers have not called yet. Idempotent."""
        if self._progress_s is None:
            self._progress_s = self._runner_s = self._trainer_s = now_s

    def progressed(self, now_s: float) -> None:
        """A batch was committed, or an evaluation group finished."""
        self._progress_s = now_s
        self._tombstones.clear()
        self._faults, self._fault_reason = 0, ""

    def runner_called(self, now_s: float) -> None:
        """A runner asked for rollouts or renewed."""
        self._runner_s = now_s

    def trainer_called(self, now_s: float) -> None:
        """A trainer asked for a batch or renewed."""
        self._trainer_s = now_s

    def batch_taken(self, trainer_id: str, batch_id: str, now_s: float) -> None:
        """A batch was leased, or returned again to its trainer."""
        if self._batch is None or self._batch[1] != batch_id:
            self._batch = (trainer_id, batch_id, now_s)

    def tombstoned(self, reason: str) -> None:
        """A group was tombstoned."""
        if len(self._tombstones) < KEPT_REASONS or reason in self._tombstones:
            self._tombstones[reason] += 1
        else:
            self._tombstones["other reasons"] += 1

    def fault(self, reason: str) -> None:
        """The infrastructure ended an attempt."""
        self._faults += 1
        self.all_faults += 1
        self._fault_reason = reason

    def idle_s(self, now_s: float) -> float:
        """Time since the last progress."""
        return now_s - self._progress_s if self._progress_s is not None else 0.0

    def batch_out(self) -> str:
        """The id of the last leased batch, which may have ended since."""
        return self._batch[1] if self._batch else ""

    def facts(self, now_s: float, *, batch_is_out: bool, **counts: object) -> Facts:
        """`counts`: the fields of `Facts` that the queue knows."""
        reasons = self._tombstones.most_common(1)
        batch = self._batch if batch_is_out else None
        known: dict[str, object] = {
            "idle_s": self.idle_s(now_s),
            "runner_silent_s": now_s - self._runner_s if self._runner_s is not None else 0.0,
            "trainer_silent_s": now_s - self._trainer_s if self._trainer_s is not None else 0.0,
            "batch": (batch[0], batch[1], now_s - batch[2]) if batch else None,
            "tombstoned": self._tombstones.total(),
            "tombstone_reason": reasons[0][0] if reasons else "",
            "faults": self._faults,
            "fault_reason": self._fault_reason,
        }
        return Facts(**(known | counts))  # type: ignore[arg-type]


def why(facts: Facts, *, after_s: float) -> Stall | None:
    """The cause; None if there was progress within `after_s`, or no group waits."""
    if facts.idle_s < after_s:
        return None
    if not facts.waiting:
        return _given_up(facts) if facts.tombstoned else None
    for find in (_by_hand, _trainer, _shards, _runners, _given_up, _faults, _head, _slow):
        found = find(facts)
        if found is not None:
            return found
    return Stall(
        cause="nothing_starts",
        text=f"{facts.queued} groups are queued and none is started, although a runner asks: "
        "look at queue.concurrency, queue.admission and queue.domain_limits of the scheduler, and "
        "at the runner's concurrency.",
    )


def _by_hand(facts: Facts) -> Stall | None:
    if facts.activity is Activity.PAUSED:
        text = "the queue is paused. Go on with: forge queue resume"
        return Stall(cause="paused", text=text)
    if facts.activity is Activity.DRAINING and not facts.running:
        text = (
            f"the queue is drained, and {facts.queued} groups wait. Go on with: forge queue resume"
        )
        return Stall(cause="drained", text=text)
    return None


def _trainer(facts: Facts) -> Stall | None:
    if facts.batch is not None:
        trainer_id, batch_id, age_s = facts.batch
        return Stall(
            cause="trainer_busy",
            text=f"trainer {trainer_id} has had {batch_id} for {age_s:.0f} s and has not committed "
            "it: its step is that long, or it hangs. Look at the trainer's log.",
        )
    if facts.complete_in_window and facts.trainer_silent_s > HEARD_S:
        return Stall(
            cause="no_trainer",
            text=f"{facts.complete_in_window} groups are complete and no trainer has asked for a "
            f"batch for {facts.trainer_silent_s:.0f} s. Start one, or look at the trainer's log.",
        )
    return None


def _shards(facts: Facts) -> Stall | None:
    if not facts.away:
        return None
    names = ", ".join(sorted(facts.away))
    return Stall(
        cause="shard_away",
        text=f"pool shard {names} does not answer, and its groups wait for it. Start it again; one "
        "whose disk is gone for good is named in the scheduler's lost_shards.",
    )


def _runners(facts: Facts) -> Stall | None:
    if facts.runner_silent_s <= HEARD_S:
        return None
    return Stall(
        cause="no_runner",
        text=f"no runner has called for {facts.runner_silent_s:.0f} s, and {facts.waiting} groups "
        "wait. Start one with: forge agents run; or look at the runner's log.",
    )


def _given_up(facts: Facts) -> Stall | None:
    if not facts.tombstoned:
        return None
    return Stall(
        cause="given_up",
        text=f"{facts.tombstoned} groups were given up since the last step, most of them as: "
        f"{_cut(facts.tombstone_reason)}. Look at the agent program, and at the runner's log.",
    )


def _faults(facts: Facts) -> Stall | None:
    if not facts.faults:
        return None
    return Stall(
        cause="faults",
        text=f"{facts.faults} attempts were ended by the infrastructure since the last step, the "
        f"last one as: {_cut(facts.fault_reason)}. They are attempted again, and count for "
        "nothing; look at the service that this names, at its disk, and at the load of its host.",
    )


def _head(facts: Facts) -> Stall | None:
    head = facts.head
    if head is None or not facts.complete_outside_window:
        return None
    if facts.complete_in_window > facts.assigned:
        return None
    return Stall(
        cause="slow_head",
        text=f"the window waits for its head, task {head.task_id} (index {head.index}): "
        f"{head.open_rollouts} of its rollouts have not ended, with {head.failures} failures so "
        f"far, and {facts.complete_outside_window} complete groups are behind the window. Wait, "
        "make the window larger, or bound rollouts by queue.rollout_timeout_s.",
    )


def _slow(facts: Facts) -> Stall | None:
    if not facts.rollouts:
        return None
    return Stall(
        cause="slow_rollouts",
        text=f"{facts.rollouts} rollouts of {facts.running} groups are under way, and "
        f"{facts.complete_in_window} groups of the next batch are complete. Rollouts take that "
        "long, or the host is overloaded: look at the inference status and at the load.",
    )


def _cut(reason: str) -> str:
    return reason if len(reason) <= REASON_CHARS else reason[:REASON_CHARS] + " ..."
