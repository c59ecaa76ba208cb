"""Stalls: the cause of a long time without training, and a remedy.

Owns the events since the last progress (`Watch`), and the one conversion of facts into a cause and
a text (`why`), which GetSchedulerStatus, `forge run` and the log show. Times come from the queue's
clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from forge.core.queue.activity import Activity
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Abilities, Phase, RolloutPhase, TaskKind

HEARD_S = 60.0
"""A runner or trainer without a call for this long counts as absent: each calls or renews at least
every 30 s (`max_wait_s`)."""
REASON_CHARS = 200
KEPT_REASONS = 64


class Stall(NamedTuple):
    """A cause, and a text with a remedy."""

    cause: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGroup:
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
    """Since a batch was committed, an evaluation group finished, or a group came to an empty
    queue."""
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
    returned: int = 0
    """Batches that were leased since the last progress and have ended without a commit."""
    trainer_waits: bool = False
    """A trainer without a batch asked for one, and none was ready: it waits for rollouts."""
    away: frozenset[str] = frozenset()
    """Unreachable pool shards."""
    tombstoned: int = 0
    """Since the last progress, like the fields below."""
    tombstone_reason: str = ""
    failed: bool = False
    """That reason is a failed rollout, not one of the trainer or of the rewards."""
    faults: int = 0
    """Attempts that the infrastructure ended."""
    fault_reason: str = ""
    head: HeadGroup | None = None
    unserved: Sequence[TaskKind] = ()
    """Kinds of waiting tasks that no live runner declares."""
    all_drained: Sequence[str] = ()
    """The live runners, if an operator drains all of them."""


def head_of(queue: GenerationQueue) -> HeadGroup | None:
    """The group at the head, if it runs."""
    group = queue.window.head_group
    if group is None or group.phase is not Phase.RUNNING:
        return None
    unsealed = [rollout for rollout in group.rollouts if rollout.phase is not RolloutPhase.SEALED]
    return HeadGroup(
        task_id=group.spec.task_id,
        index=group.spec.index,
        open_rollouts=len(unsealed),
        failures=sum(rollout.failures for rollout in unsealed),
    )


class Watch:
    """Events since the last progress."""

    def __init__(self) -> None:
        self._progress_s: float | None = None
        self._runner_s: float | None = None
        self._trainer_s: float | None = None
        self._runners: dict[str, tuple[Abilities | None, float]] = {}
        """By runner id: its declaration (None: it is drained), and the time of its last call."""
        self._batch: tuple[str, str, float] | None = None
        self._batches = 0
        """Batches leased since the last progress."""
        self.trainer_waits = False
        """No batch is out, and the trainer asked in vain; one with a batch asks ahead."""
        self._tombstones: Counter[tuple[str, bool]] = Counter()
        """By reason, and whether a rollout failed."""
        self._dropped: set[str] = set()
        """Tasks that are tombstoned on request now."""
        self._faults = 0
        self._fault_reason = ""
        self.all_faults = 0
        """Faults of the term."""

    def began(self, now_s: float) -> None:
        """Note that the term began; runners and trainers have not called yet. Idempotent."""
        if self._progress_s is None:
            self._progress_s = self._runner_s = self._trainer_s = now_s

    def progressed(self, now_s: float) -> None:
        """Note that a batch was committed, or an evaluation group finished."""
        self._progress_s = now_s
        self._batches = 0
        self._tombstones.clear()
        self._dropped.clear()
        self._faults, self._fault_reason = 0, ""

    def work_came(self, now_s: float) -> None:
        """Note a group in an empty queue, which had nothing to train on before. If tombstones
        emptied the queue, the time without training continues."""
        if not self._tombstones:
            self._progress_s = now_s

    def runner_called(self, now_s: float) -> None:
        """Note that a runner asked for rollouts or renewed."""
        self._runner_s = now_s

    def runner_declared(self, runner_id: str, abilities: Abilities | None, now_s: float) -> None:
        """Note that a runner asked for rollouts; None: it is drained."""
        self._runners[runner_id] = abilities, now_s

    def runner_drained(self, runner_id: str) -> None:
        """Note that an operator drains a runner; a resumed one declares itself with its next
        call."""
        if runner_id in self._runners:
            self._runners[runner_id] = None, self._runners[runner_id][1]

    def runner_renewed(self, runner_id: str, now_s: float) -> None:
        """Note that a runner renewed; a busy one asks for nothing."""
        if runner_id in self._runners:
            self._runners[runner_id] = self._runners[runner_id][0], now_s

    def unserved(self, kinds: Iterable[TaskKind], now_s: float) -> list[TaskKind]:
        """The kinds that no live runner declares; none without a live runner."""
        declared = {able for able, _ in self._live(now_s).values() if able is not None}
        if not declared:
            return []
        return sorted(kind for kind in kinds if not any(able.cover(kind) for able in declared))

    def all_drained(self, now_s: float) -> list[str]:
        """The live runners, if all of them are drained."""
        live = self._live(now_s)
        return [] if any(able is not None for able, _ in live.values()) else sorted(live)

    def _live(self, now_s: float) -> dict[str, tuple[Abilities | None, float]]:
        self._runners = {
            runner_id: entry
            for runner_id, entry in self._runners.items()
            if now_s - entry[1] <= HEARD_S
        }
        return self._runners

    def trainer_called(self, now_s: float) -> None:
        """Note that a trainer asked for a batch or renewed."""
        self._trainer_s = now_s

    def batch_taken(self, trainer_id: str, batch_id: str, now_s: float) -> None:
        """Note that a batch was leased, or returned again to its trainer."""
        self.trainer_waits = False
        if self._batch is None or self._batch[1] != batch_id:
            self._batch = (trainer_id, batch_id, now_s)
            self._batches += 1

    def dropping(self, task_ids: Iterable[str]) -> None:
        """Note that groups are tombstoned on request: that is no cause of a stall."""
        self._dropped.update(task_ids)

    def tombstoned(self, task_id: str, reason: str, *, failed: bool) -> None:
        """Note that a group was tombstoned, `failed`: because a rollout failed."""
        if task_id in self._dropped:
            self._dropped.remove(task_id)
            return
        key = reason, failed
        if len(self._tombstones) >= KEPT_REASONS and key not in self._tombstones:
            key = "other reasons", failed
        self._tombstones[key] += 1

    def fault(self, reason: str) -> None:
        """Note that the infrastructure ended an attempt."""
        self._faults += 1
        self.all_faults += 1
        self._fault_reason = reason

    def idle_s(self, now_s: float) -> float:
        """Time since the last progress, or since the first group that came to an empty queue."""
        return now_s - self._progress_s if self._progress_s is not None else 0.0

    def batch_out(self) -> str:
        """The id of the last leased batch, which may have ended since."""
        return self._batch[1] if self._batch else ""

    def facts(self, now_s: float, *, batch_is_out: bool, **counts: object) -> Facts:
        """`counts`: the fields of `Facts` that the queue knows."""
        reasons = self._tombstones.most_common(1)
        batch = self._batch if batch_is_out else None
        return Facts(
            idle_s=self.idle_s(now_s),
            runner_silent_s=now_s - self._runner_s if self._runner_s is not None else 0.0,
            trainer_silent_s=now_s - self._trainer_s if self._trainer_s is not None else 0.0,
            batch=(batch[0], batch[1], now_s - batch[2]) if batch else None,
            returned=max(0, self._batches - batch_is_out),
            trainer_waits=self.trainer_waits,
            tombstoned=self._tombstones.total(),
            tombstone_reason=reasons[0][0][0] if reasons else "",
            failed=bool(reasons) and reasons[0][0][1],
            faults=self._faults,
            fault_reason=self._fault_reason,
            **counts,  # type: ignore[arg-type]
        )


def why(facts: Facts, *, after_s: float) -> Stall | None:
    """The cause; None if there was progress or a new batch within `after_s`, or no group waits."""
    leased_s = facts.batch[2] if facts.batch is not None else facts.idle_s
    if min(facts.idle_s, leased_s) < after_s:
        return None
    if not facts.waiting:
        return _given_up(facts) if facts.tombstoned else None
    return next(chain(_missing_parts(facts), _slow_parts(facts)))


def _missing_parts(facts: Facts) -> Iterator[Stall]:
    """The operator, trainers, pool shards and runners."""
    if facts.activity is Activity.PAUSED:
        yield Stall("paused", "the queue is paused. Continue with: forge queue resume")
    if facts.activity is Activity.DRAINING and not facts.running:
        text = f"the queue is drained, and {facts.queued} groups wait. Continue with: "
        yield Stall("drained", text + "forge queue resume")
    yield from _missing_trainer(facts)
    if facts.away:
        text = (
            f"pool shard {', '.join(sorted(facts.away))} does not answer, and its groups wait. "
            "Start it again; if its disk is lost, run: forge pool declare-lost SHARD"
        )
        yield Stall("shard_away", text)
    if facts.runner_silent_s > HEARD_S:
        text = (
            f"no runner has called for {facts.runner_silent_s:.0f} s, and {facts.waiting} groups "
            "wait. Start one with: forge agents run; or read the runner's log."
        )
        yield Stall("no_runner", text)
    if facts.all_drained and not facts.rollouts:
        text = (
            f"an operator drains every runner that calls: {', '.join(facts.all_drained)}. Resume "
            "one with: forge queue drain-runner RUNNER --resume; or start another"
        )
        yield Stall("runners_drained", text)
    if facts.unserved:
        kinds = ", ".join(f"{kind.domain} (scaffold {kind.scaffold})" for kind in facts.unserved)
        text = (
            f"tasks wait whose domain or scaffold no runner has: {kinds}. Start a runner with the "
            "settings `domains`, `reward_functions` or `scaffolds` that name it, or drop them: "
            "forge queue drop --domain DOMAIN --reason TEXT"
        )
        yield Stall("no_able_runner", text)


def _missing_trainer(facts: Facts) -> Iterator[Stall]:
    """A trainer that holds its batch, or none that asks for one."""
    if facts.batch is not None:
        trainer_id, batch_id, age_s = facts.batch
        text = (
            f"trainer {trainer_id} has had {batch_id} for {age_s:.0f} s without a commit: its step "
            "is that long, or it hangs. Read the trainer's log."
        )
        yield Stall("trainer_busy", text)
    elif facts.complete_in_window and facts.trainer_silent_s > HEARD_S:
        text = (
            f"{facts.complete_in_window} groups are complete, and no trainer has asked for a batch "
            f"for {facts.trainer_silent_s:.0f} s. Start one, or read the trainer's log."
        )
        yield Stall("no_trainer", text)


def _slow_parts(facts: Facts) -> Iterator[Stall]:
    """Failed and slow rollouts; ends with a cause that always applies."""
    if facts.tombstoned:
        yield _given_up(facts)
    if facts.faults:
        text = (
            f"the infrastructure ended {facts.faults} attempts since the last step, the last one "
            f"with: {_cut(facts.fault_reason)}. They are retried without a charge to the task. "
            "Check the service that this names, its disk, and the load of its host."
        )
        yield Stall("faults", text)
    if facts.returned and facts.complete_in_window and not facts.trainer_waits:
        text = (
            f"trainers took {facts.returned} batches since the last step and committed none: the "
            "trainer crashes, or each step fails. Read the trainer's log."
        )
        yield Stall("trainer_failing", text)
    head, beyond = facts.head, facts.complete_outside_window
    if head is not None and beyond and facts.complete_in_window <= facts.assigned:
        text = (
            f"the window waits for its head, task {head.task_id} (index {head.index}): "
            f"{head.open_rollouts} of its rollouts have not ended, with {head.failures} failures, "
            f"and {beyond} complete groups are behind the window. Wait, enlarge the window, or "
            "bound rollouts by queue.rollout_timeout_s."
        )
        yield Stall("slow_head", text)
    if facts.rollouts:
        text = (
            f"{facts.rollouts} rollouts of {facts.running} groups run, and "
            f"{facts.complete_in_window} groups of the next batch are complete. Rollouts take that "
            "long, or the host is overloaded: check the inference status and the load."
        )
        yield Stall("slow_rollouts", text)
    text = (
        f"{facts.queued} groups are queued and none is started, although a runner asks: check "
        "queue.concurrency, queue.admission and queue.domain_limits of the scheduler, and the "
        "runner's concurrency."
    )
    yield Stall("nothing_starts", text)


def _given_up(facts: Facts) -> Stall:
    text = (
        f"{facts.tombstoned} groups were tombstoned since the last step, most of them with: "
        f"{_cut(facts.tombstone_reason)}."
    )
    text += " Check the agent program and the runner's log." if facts.failed else ""
    return Stall("given_up", text)


def _cut(reason: str) -> str:
    return reason if len(reason) <= REASON_CHARS else reason[:REASON_CHARS] + " ..."
