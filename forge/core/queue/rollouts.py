"""The sampling side of the generation queue: rollouts are leased to runners.

Owns leases, attempts and retries. A failed rollout is retried after a back-off, under a new attempt
number, as often as `partial_groups` allows; then its group is tombstoned with the reason, so a
partial group is never trained on. Only failures of the task count against that limit; those of the
infrastructure cost only time (`forge.core.queue.dispatch.failures`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forge.core.errors import NotFound
from forge.core.queue.activity import Activity
from forge.core.queue.admission import PartialGroups, QueueSettings
from forge.core.queue.dispatch.dispatch import LeasedAttempts, Slot
from forge.core.queue.dispatch.failures import FailureKind
from forge.core.queue.dispatch.losses import Losses
from forge.core.queue.dispatch.renewals import Renewals
from forge.core.queue.group_ledger import GroupLedger
from forge.core.queue.groups import (
    ANY,
    Abilities,
    Group,
    Lease,
    Phase,
    Rollout,
    RolloutPhase,
)
from forge.core.trajectory import TaskId, TrajectoryId, parse_trajectory_id

MOST_UNREAD = 65_536
"""Most remembered renewals for unknown groups."""
TERM_ATTEMPTS = 1_000
"""Attempt numbers per term, so that attempts of two leaders never share an id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutClaim:
    """One attempt, leased to a runner. The id of the lease is its trajectory id."""

    trajectory_id: TrajectoryId
    task_id: TaskId
    rollout_index: int
    failures: int


class Rollouts:
    """Every rollout of one leader's term."""

    def __init__(self, ledger: GroupLedger, settings: QueueSettings, *, term: int) -> None:
        self._ledger = ledger
        self._settings = settings
        self._first_attempt = term * TERM_ATTEMPTS
        self.hold_until_s = 0.0
        """No rollout is leased before, see `hold`."""
        self._claims = LeasedAttempts()
        self._renewals = Renewals(settings.rollout_lease_s)
        self._sealed = 0
        """Rollouts sealed under this leader."""
        self.adopted = 0
        """Leases of earlier terms that renewals took over."""
        self._unread: dict[str, tuple[float, str]] = {}
        """Renewal times and runners of leases whose groups may be on unread pool shards."""
        self._losses = Losses()
        self.retries = 0
        self.surplus = 0
        """Reports of trajectories sealed after another attempt, or after `Group.close`."""

    def __len__(self) -> int:
        """Leased attempts."""
        return len(self._claims)

    def hold(self, *, until_s: float) -> None:
        """Lease no rollout before `until_s`, so that runners of an earlier term can renew."""
        self.hold_until_s = until_s

    def group_of(self, trajectory_id: str) -> Group:
        """The group of a trajectory. Raises NotFound, InvalidArgument."""
        slot, _ = self._locate(trajectory_id)
        return slot.group

    def lease(
        self, *, runner_id: str, max_rollouts: int, now_s: float, able: Abilities = ANY
    ) -> tuple[RolloutClaim, ...]:
        """The next rollouts that the runner is able to do, in the order of places, with at most N
        groups running."""
        if now_s < self.hold_until_s or self._ledger.activity is Activity.PAUSED:
            return ()
        for slot in self._claims.due_retries(now_s):
            # A queued group lists its rollouts when it starts.
            if slot.group.phase is Phase.RUNNING:
                self._ledger.dispatch.list_rollout(slot)
        claims: list[RolloutClaim] = []
        while len(claims) < max_rollouts and (free := self._next_slot(now_s, able)) is not None:
            claims.append(self._claim(free, runner_id, now_s))
        return tuple(claims)

    def renew(self, trajectory_id: str, *, now_s: float, runner_id: str = "") -> bool:
        """Extend a lease; False if it is lost and the rollout should stop.

        An expired lease, or one of an earlier term, starts again unless another runner has the
        rollout; the latter belongs to `runner_id` then.
        """
        self._losses.heard_of(trajectory_id)
        lease = self._claims.get(TrajectoryId(trajectory_id)) or self._take_back(trajectory_id)
        if lease is None:
            return self._adopt(trajectory_id, runner_id, now_s)
        pause_s, lease.renewed_s = now_s - lease.renewed_s, now_s
        self._renewals.renewed(lease.runner_id, pause_s=pause_s, now_s=now_s)
        lease.expires_s = min(now_s + self._renewals.lease_s(lease.runner_id), lease.deadline_s)
        return lease.expires_s > now_s

    def renew_unread(self, trajectory_id: str, *, now_s: float, runner_id: str = "") -> bool:
        """`renew` while a pool shard is unread: a renewal for an unknown group is remembered until
        `all_read`."""
        if parse_trajectory_id(trajectory_id).task_id in self._ledger:
            return self.renew(trajectory_id, now_s=now_s, runner_id=runner_id)
        if len(self._unread) < MOST_UNREAD:
            self._unread[trajectory_id] = (now_s, runner_id)
        return True

    def all_read(self, *, now_s: float) -> None:
        """Every pool shard was read: apply the remembered renewals that are recent."""
        unread, self._unread = self._unread, {}
        for trajectory_id, (renewed_s, runner_id) in unread.items():
            if now_s - renewed_s <= self._settings.rollout_lease_s:
                self.renew(trajectory_id, now_s=now_s, runner_id=runner_id)

    def give_back(self, trajectory_ids: Iterable[str]) -> None:
        """Leases that reached no runner: their rollouts are ready again, as the same attempts."""
        for slot in self._claims.give_back(trajectory_ids):
            self._ledger.dispatch.list_rollout(slot)

    def complete(self, trajectory_id: str, *, now_s: float = 0.0) -> bool:
        """Records a trajectory that is sealed in the pool; returns False if that changes nothing.

        Any attempt counts, also one whose lease was lost. Raises NotFound.
        """
        slot, attempt = self._locate(trajectory_id)
        group = slot.group
        if not group.phase.open or slot.rollout.phase is RolloutPhase.SEALED:
            self.surplus += trajectory_id not in group.sealed_ids()
            return False
        self._claims.drop(slot.rollout)
        slot.rollout.phase, slot.rollout.attempt = RolloutPhase.SEALED, attempt
        slot.rollout.lapsed = None
        group.sealed += 1
        self._sealed += 1
        self._ledger.close_if_sealed(group, now_s)
        return True

    def fail(
        self,
        trajectory_id: str,
        *,
        reason: str,
        permanent: bool,
        now_s: float,
        kind: FailureKind = FailureKind.TASK,
    ) -> bool:
        """An attempt failed: retry after a back-off, or tombstone the group.

        False if the report changes nothing: repeated, late, or of a replaced attempt. Raises
        NotFound.
        """
        slot, attempt = self._locate(trajectory_id)
        self._losses.heard_of(trajectory_id)
        if not slot.group.phase.open or not self._is_current(slot.rollout, attempt):
            return False
        rollout = slot.rollout
        lease = self._end_attempt(rollout, attempt)
        if permanent or kind is FailureKind.TASK:
            rollout.failures, rollout.faults = rollout.failures + 1, 0
            pause_s = self._settings.backoff_s(rollout.failures)
        else:
            rollout.faults += 1
            if lease is not None and self._sealed_during(lease):
                self._losses.charge(rollout)
            pause_s = self._settings.backoff_s(rollout.faults)
        why = reason if permanent else self._why_no_further(rollout, kind, reason)
        if why:
            self._give_up(slot.group, f"rollout {slot.rollout_index}: {why}")
        else:
            self._try_again(slot, now_s + pause_s)
        return True

    def drop(self, task_ids: Iterable[str], *, reason: str) -> None:
        """Tombstone groups, except those that are settled or in a batch by now."""
        for group in map(self._ledger.group, task_ids):
            if group.phase.droppable:
                self._give_up(group, reason)

    def lapse(self, trajectory_id: str, *, now_s: float) -> FailureKind | None:
        """A lease expired without a sealed trajectory: its runner is silent, or the attempt reached
        `rollout_timeout_s`, which is a failure of the task.

        The kind of the failure; None if it changes nothing: renewed meanwhile, or settled.
        """
        lease = self._claims.get(TrajectoryId(trajectory_id))
        if lease is None or lease.expires_s > now_s:
            return None
        if lease.deadline_s <= now_s:
            limit_s = self._settings.rollout_timeout_s
            reason = f"no end within rollout_timeout_s = {limit_s:g}"
            failed = self.fail(trajectory_id, reason=reason, permanent=False, now_s=now_s)
            return FailureKind.TASK if failed else None
        slot, attempt = self._locate(trajectory_id)
        self._end_attempt(slot.rollout, attempt)
        slot.rollout.lapsed = lease
        if self._sealed_during(lease):
            self._losses.charge(slot.rollout, silent=trajectory_id)
        why = self._why_no_further(slot.rollout, FailureKind.INFRASTRUCTURE, "its runner is silent")
        if why:
            self._give_up(slot.group, f"rollout {slot.rollout_index}: {why}")
        else:
            # The wait for the expiry replaces a longer back-off.
            self._try_again(slot, now_s + self._settings.backoff_s(1))
        return FailureKind.INFRASTRUCTURE

    def expire(self, now_s: float) -> tuple[TrajectoryId, ...]:
        """The attempts with expired leases.

        Only the pool knows whether such an attempt was sealed: follow with `complete` or `lapse`.
        Until then this method repeats it every `RECHECK_S`.
        """
        return tuple(self._claims.expired(now_s))

    def can_progress(self) -> bool:
        """Whether a training group may become complete before the next batch is taken."""
        ledger = self._ledger
        if ledger.counts.runs(evaluation=False, away=ledger.away):
            return True
        # The end of evaluation groups frees places, and domains at their limits.
        evaluating = ledger.counts.runs(evaluation=True, away=ledger.away)
        fresh = ledger.dispatch.first_group(evaluation=False, away=ledger.away)
        if fresh is None:
            return evaluating and ledger.dispatch.holds_back
        free = ledger.counts.running < self._settings.concurrency
        return (free or evaluating) and self._admits(fresh)

    def next_event_s(self) -> tuple[float | None, ...]:
        """The ends of the hold, of a lease and of a back-off."""
        return (self.hold_until_s, *self._claims.next_event_s())

    def runner_of(self, trajectory_id: str) -> str:
        """The runner with the lease of an attempt; empty without one."""
        lease = self._claims.get(TrajectoryId(trajectory_id))
        return lease.runner_id if lease else ""

    def running_of(self, runner_id: str) -> int:
        """The number of leases of a runner."""
        return self._claims.of_runner(runner_id)

    def _next_slot(self, now_s: float, able: Abilities) -> Slot | None:
        return self._first_of(True, now_s, able) or self._first_of(False, now_s, able)

    def _first_of(self, evaluation: bool, now_s: float, able: Abilities) -> Slot | None:
        order, away = self._ledger.dispatch, self._ledger.away
        while True:
            slot = order.first_rollout(evaluation=evaluation, away=away, able=able)
            fresh = order.first_group(evaluation=evaluation, away=away, able=able)
            if fresh is None or (slot is not None and slot < Slot.of(fresh, 0)):
                return slot
            if self._ledger.counts.running >= self._settings.concurrency or not self._admits(fresh):
                return slot
            self._start(fresh, now_s)

    def _admits(self, group: Group) -> bool:
        """Whether it may start while fewer than N groups run."""
        if self._ledger.activity is not Activity.RUNNING:
            return False
        if group.spec.evaluation:
            return True
        ledger = self._ledger
        return ledger.selection.admits(group, ledger.window, ledger.counts)

    def _start(self, group: Group, now_s: float) -> None:
        self._ledger.start(group, now_s)
        for index in range(group.spec.size):
            if group.rollout(index).phase is RolloutPhase.READY:
                self._ledger.dispatch.list_rollout(Slot.of(group, index))

    def _claim(self, slot: Slot, runner_id: str, now_s: float) -> RolloutClaim:
        rollout = slot.rollout
        rollout.attempt = max(rollout.attempt, self._first_attempt)
        lease = self._hold(slot, rollout.attempt, runner_id, now_s)
        return RolloutClaim(
            trajectory_id=lease.trajectory_id,
            task_id=slot.group.spec.task_id,
            rollout_index=slot.rollout_index,
            failures=rollout.failures,
        )

    def _hold(self, slot: Slot, attempt: int, runner_id: str, now_s: float) -> Lease:
        settings = self._settings
        lease = Lease(
            trajectory_id=slot.group.trajectory_id(slot.rollout_index, attempt),
            runner_id=runner_id,
            expires_s=now_s + min(self._renewals.lease_s(runner_id), settings.rollout_timeout_s),
            deadline_s=now_s + settings.rollout_timeout_s,
            renewed_s=now_s,
            sealed_before=self._sealed,
        )
        slot.rollout.lapsed = None
        self._claims.hold(lease, slot)
        return lease

    def _take_back(self, trajectory_id: str) -> Lease | None:
        """Start an expired lease again, unless the rollout has another one."""
        try:
            slot, attempt = self._locate(trajectory_id)
        except NotFound:
            return None
        # A closed group has no rollouts; `Slot.rollout` would create them again.
        lease = slot.rollout.lapsed if slot.group.phase is Phase.RUNNING else None
        if lease is None or lease.trajectory_id != trajectory_id:
            return None
        rollout, slot.rollout.lapsed = slot.rollout, None
        rollout.attempt = attempt
        self._claims.hold(lease, slot)
        return lease

    def _adopt(self, trajectory_id: str, runner_id: str, now_s: float) -> bool:
        try:
            slot, attempt = self._locate(trajectory_id)
        except NotFound:
            return False
        group = slot.group
        if not group.phase.open or group.moved:
            return False
        if not self._is_of_earlier_term(slot.rollout, attempt):
            return False
        if group.phase is Phase.QUEUED:
            if self._ledger.counts.running >= self._settings.concurrency:
                return False
            self._start(group, now_s)
        slot.rollout.attempt = attempt
        self.adopted += 1
        self._hold(slot, attempt, runner_id, now_s)
        return True

    def _is_current(self, rollout: Rollout, attempt: int) -> bool:
        """Whether a failure of `attempt` changes the rollout."""
        if rollout.lease is not None:
            return attempt == rollout.attempt
        return self._is_of_earlier_term(rollout, attempt)

    def _is_of_earlier_term(self, rollout: Rollout, attempt: int) -> bool:
        """Whether an earlier leader leased `attempt`, and no newer one is known."""
        ready = rollout.phase is RolloutPhase.READY
        return ready and rollout.attempt <= attempt < self._first_attempt

    def _give_up(self, group: Group, reason: str) -> None:
        for rollout in group.rollouts:
            self._claims.drop(rollout)
        self._ledger.tombstone(group, reason)

    def _end_attempt(self, rollout: Rollout, attempt: int) -> Lease | None:
        """End the lease of the rollout, and return it; the next attempt has a new number."""
        lease = rollout.lease
        self._claims.drop(rollout)
        rollout.phase, rollout.lapsed = RolloutPhase.READY, None
        rollout.attempt = attempt + 1
        return lease

    def _sealed_during(self, lease: Lease) -> bool:
        """Whether rollouts were sealed since the grant: the cluster works."""
        return self._sealed > lease.sealed_before

    def _try_again(self, slot: Slot, ready_s: float) -> None:
        self.retries += 1
        self._claims.retry_at(ready_s, slot)

    def _why_no_further(self, rollout: Rollout, kind: FailureKind, reason: str) -> str:
        """Reason why there is no further attempt; "" if there is one."""
        settings, partial = self._settings, self._settings.partial_groups
        # Higher numbers belong to the next leader.
        if rollout.attempt >= self._first_attempt + TERM_ATTEMPTS:
            return reason
        if kind is FailureKind.TASK:
            spent = partial is PartialGroups.FILL and rollout.failures >= settings.max_attempts
            return reason if spent or partial is PartialGroups.DROP else ""
        if partial is PartialGroups.WAIT or rollout.losses < settings.max_losses:
            return ""
        return (
            f"its attempts were lost {rollout.losses} times while other rollouts were sealed "
            f"(max_losses = {settings.max_losses}): it may exhaust its host. The last one: {reason}"
        )

    def _locate(self, trajectory_id: str) -> tuple[Slot, int]:
        name = parse_trajectory_id(trajectory_id)
        group = self._ledger.group(name.task_id)
        if name.rollout_index >= group.spec.size:
            raise NotFound(
                f"trajectory_id {trajectory_id!r}: task {name.task_id} has rollouts 0 to "
                f"{group.spec.size - 1}"
            )
        return Slot.of(group, name.rollout_index), name.attempt
