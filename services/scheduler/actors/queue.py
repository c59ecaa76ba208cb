"""The queue actor: the state of the term, its clock and its long polls.

It waits for no other process, so a pool shard that hangs delays no lease and no batch of another
shard. `outcome_writer` stores groups that end here; `expired_leases` looks expired attempts up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar

from forge.core.errors import ActorStopped, MailboxFull, NotFound, Unavailable
from forge.core.queue.groups import Phase
from forge.runtime.actors.actor import Actor
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from forge.v1.scheduler_pb2 import GetSchedulerStatusResponse
from services.scheduler import metrics
from services.scheduler.listening_clock import ListeningClock
from services.scheduler.long_polls import LongPolls
from services.scheduler.shards.pool_shards import GroupStateChange
from services.scheduler.state.draining_runners import (
    ApplyDrains,
    DrainingRunners,
    IsDraining,
)
from services.scheduler.state.erased_groups import NoteErased
from services.scheduler.state.messages.batches import (
    ApplyCommit,
    ApplyRelease,
    ApplyRewind,
    BatchView,
    CommitBatch,
    FindForgotten,
    PrepareRelease,
    PrepareRewind,
    RecallGroups,
    RenewBatch,
    TakeBatch,
)
from services.scheduler.state.messages.groups import (
    AddGroups,
    DropGroups,
    FindNew,
    ListTagged,
    RestoreGroups,
    StoreFinalStates,
    ViewGroups,
)
from services.scheduler.state.messages.removals import (
    FindMovable,
    GroupsMoved,
    GroupsOn,
    RemoveShard,
)
from services.scheduler.state.messages.rollouts import (
    CheckExpired,
    DismissRunner,
    FindUnknown,
    Grant,
    LeaseRollouts,
    LocateRollouts,
    RenewRollouts,
    ReturnRollouts,
    SettleRollouts,
)
from services.scheduler.state.messages.term import (
    Connect,
    GetStatus,
    NoteHead,
    SetActivity,
    SetAway,
    Tick,
)
from services.scheduler.state.queries.queue_positions import GetQueue, positions_of
from services.scheduler.state.queries.queue_status import status_of, tombstones_of
from services.scheduler.state.queries.removed_shards import movable, on_shard
from services.scheduler.state.stored_group import new_group
from services.scheduler.state.term_state import TermState

STALL_LOG_S = 300.0
"""Between two warnings of a stall with the same cause."""
_KEPT = {
    Phase.BATCHED: common_pb2.GROUP_STATE_PENDING,
    Phase.EVALUATED: common_pb2.GROUP_STATE_EVALUATED,
}
"""In the pool, of groups that an operator can no longer drop."""
MAX_TICK_S = 1.0
"""Longest time between two ticks, and so the age of the gauges."""


class QueueActor(Actor):
    """One leader's generation queue."""

    mailbox_size: ClassVar[int] = 8192

    def __init__(
        self,
        state: TermState,
        *,
        clock: ListeningClock,
        loop_time: Callable[[], float] = time.monotonic,
    ) -> None:
        """`loop_time` measures the delay of each tick."""
        self._state = state
        self._clock = clock
        self._loop_time = loop_time
        self._runners = LongPolls[LeaseRollouts, tuple[Grant, ...]](
            self._grant, kind=lambda ask: (ask.abilities, self._is_draining(ask))
        )
        self._trainers = LongPolls[TakeBatch, BatchView](self._take, kind=id)
        self._peers: Connect | None = None
        self._final_states: list[tuple[str, GroupStateChange]] = []
        """With their shards; what `outcome_writer` has not accepted yet."""
        self._logged_cause = ""
        """Cause of the last stall in the log."""
        self._log_again_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._tick_due_s = math.inf
        """By `loop_time`."""

    async def receive(self, message: Any) -> Any:
        """Handles every message of `services.scheduler.state.messages` to the queue."""
        if isinstance(message, Tick):
            self._clock.missed(self._loop_time() - self._tick_due_s)
        try:
            return self._handle(message)
        except NotFound as error:
            # The group may be on a shard that has not been read: UNAVAILABLE, not NOT_FOUND.
            raise self._state.unread_error(str(error)) or error from None
        finally:
            # Any change may answer a waiting call. Trainers first: groups assigned to a batch move
            # the head, so more rollouts may start.
            self._trainers.serve()
            self._runners.serve()
            self._send_final_states()
            self._set_timer()

    async def stopped(self) -> None:
        """Answers every waiting call with Unavailable."""
        if self._timer is not None:
            self._timer.cancel()
        error = Unavailable("this scheduler is no longer the leader")
        self._runners.close(error)
        self._trainers.close(error)

    def _handle(self, message: Any) -> Any:
        state, now_s = self._state, self._clock()
        match message:
            case LeaseRollouts(runner_id=runner_id, abilities=abilities):
                state.watch.runner_called(now_s)
                able = None if self._is_draining(message) else abilities
                state.watch.runner_declared(runner_id, able, now_s)
                return self._runners.enter(message, message.answer)
            case DismissRunner(runner_id=runner_id):
                self._runners.dismiss(lambda ask: ask.runner_id == runner_id, answer=())
            case ReturnRollouts(grants=grants):
                state.queue.rollouts.give_back(grant.trajectory_id for grant in grants)
            case RenewRollouts(lease_ids=ids, runner_id=runner_id):
                state.watch.runner_called(now_s)
                return state.renew(ids, now_s=now_s, runner_id=runner_id)
            case FindUnknown(trajectory_ids=ids, looked_up=looked_up):
                return state.find_unknown(ids, looked_up)
            case SettleRollouts(reports=reports):
                for report in reports:
                    state.settle(report, now_s=now_s)
            case Tick():
                self._tick(now_s)
            case Connect():
                self._peers = message
                state.watch.began(now_s)
            case _:
                return self._query(message, now_s)
        return None

    def _query(self, message: Any, now_s: float) -> Any:
        """Messages that change nothing."""
        state = self._state
        match message:
            case LocateRollouts(trajectory_ids=ids):
                return state.locate(ids)
            case GetStatus(with_tombstones=wanted):
                status = status_of(state, now_s=now_s)
                status.tombstones.extend(tombstones_of(state) if wanted else ())
                return status
            case GetQueue():
                return positions_of(state, message)
            case ListTagged(tag=tag):
                state.check_all_read()
                return state.settled.tagged(tag)
            case ViewGroups(task_ids=ids):
                return state.view(ids)
            case FindNew():
                return state.find_new(message)
            case IsDraining(runner_id=runner_id, start_id=start_id):
                return state.draining.holds(runner_id, start_id)
            case NoteHead():
                return state.queue.window.lowest_pending
            case _:
                return self._change_groups(message, now_s)

    def _change_groups(self, message: Any, now_s: float) -> Any:
        """Messages of the other actors of the term about groups."""
        state = self._state
        match message:
            case AddGroups(records=records):
                for record in records:
                    state.add_group(record, new_group(record), now_s=now_s)
            case RestoreGroups():
                state.earlier.restore_joined(message, now_s=now_s)
            case SetActivity(activity=activity):
                state.queue.set_activity(activity)
            case ApplyDrains(start_ids=start_ids, runner_id=runner_id):
                self._apply_drains(start_ids)
                return state.queue.rollouts.running_of(runner_id)
            case DropGroups(stored=False):
                return state.prepare_drop(message)
            case DropGroups(task_ids=ids, reason=reason):
                state.watch.dropping(ids)
                state.queue.rollouts.drop(ids, reason=reason)
                return self._kept(ids)
            case NoteErased(task_ids=ids):
                return state.erased.note(ids)
            case _:
                return self._change_shards(message, now_s)
        return None

    def _change_shards(self, message: Any, now_s: float) -> Any:
        """Messages about the pool shards: absent ones, moved groups and removals."""
        state = self._state
        match message:
            case SetAway(shards=shards, unread=unread, retiring=retiring):
                state.set_away(shards, unread=unread, now_s=now_s, retiring=retiring)
            case FindMovable():
                return movable(state, message, now_s=now_s)
            case GroupsMoved(moved=moved, source=source, target=target):
                state.queue.ledger.relocate(moved, source=source, target=target)
            case GroupsOn(shard=shard):
                return on_shard(state, shard)
            case RemoveShard(shard=shard):
                state.queue.ledger.remove_shard(shard)
            case _:
                return self._change_batch(message, now_s)
        return None

    def _change_batch(self, message: Any, now_s: float) -> Any:
        """Messages about batches: reads, renewals, commits, releases and rewinds."""
        state = self._state
        match message:
            case TakeBatch():
                state.watch.trainer_called(now_s)
                state.check_read(chain.from_iterable(message.held.values()))
                return self._trainers.enter(message, message.answer)
            case RenewBatch(batch_id=batch_id):
                state.watch.trainer_called(now_s)
                state.queue.batches.renew(batch_id, now_s=now_s)
            case CommitBatch():
                return state.prepare_commit(message, now_s=now_s)
            case ApplyCommit(batch_id=batch_id, step=step):
                state.commit(batch_id, step=step, now_s=now_s)
            case PrepareRelease(batch_id=batch_id):
                return state.prepare_release(batch_id, now_s=now_s)
            case ApplyRelease(batch_id=batch_id, reasons=reasons):
                state.queue.batches.release(batch_id, reasons)
            case FindForgotten(step=step):
                return state.shards_to_recall(step)
            case RecallGroups(groups=groups, step=step):
                state.settled.recall(groups, after=step)
            case PrepareRewind(step=step):
                return state.prepare_rewind(step)
            case ApplyRewind(step=step):
                return state.queue.batches.rewind(step)
            case _:
                raise NotImplementedError(f"the queue handles no {type(message).__name__}")
        return None

    def _kept(self, task_ids: Iterable[str]) -> dict[str, list[GroupStateChange]]:
        """The states of groups that were not dropped, since they are in a batch or evaluated by
        now, by pool shard."""
        kept: defaultdict[str, list[GroupStateChange]] = defaultdict(list)
        for group in map(self._state.queue.ledger.group, task_ids):
            if (state := _KEPT.get(group.phase)) is not None:
                change = GroupStateChange(task_id=group.spec.task_id, state=state)
                kept[group.spec.shard].append(change)
        return kept

    def _is_draining(self, ask: LeaseRollouts) -> bool:
        return self._state.draining.holds(ask.runner_id, ask.start_id)

    def _apply_drains(self, start_ids: Mapping[str, str]) -> None:
        before, now = self._state.draining, DrainingRunners(start_ids)
        self._state.draining = now
        for runner_id, start_id in start_ids.items():
            if not before.holds(runner_id, start_id):
                self._state.watch.runner_drained(runner_id)
        # The calls of both kinds: a runner learns of its drain, and asks again after it.
        self._runners.dismiss(
            lambda ask: (
                before.holds(ask.runner_id, ask.start_id) != now.holds(ask.runner_id, ask.start_id)
            ),
            answer=(),
        )

    def _grant(self, request: LeaseRollouts) -> tuple[Grant, ...] | None:
        if self._is_draining(request):
            return None
        grants = self._state.grant(
            runner_id=request.runner_id,
            max_rollouts=request.max_rollouts,
            now_s=self._clock(),
            able=request.abilities,
            lease_bytes=request.lease_bytes,
        )
        return grants or None

    def _take(self, request: TakeBatch) -> BatchView | None:
        for batch_id, task_ids in request.held.items():
            self._state.queue.batches.adopt(batch_id, task_ids, now_s=self._clock())
        return self._state.take_batch(
            trainer_id=request.trainer_id, max_groups=request.max_groups, now_s=self._clock()
        )

    def _tick(self, now_s: float) -> None:
        self._timer, self._tick_due_s = None, math.inf
        status = status_of(self._state, now_s=now_s)
        metrics.show(status)
        self._log_stall(status, now_s)
        expired = self._state.expire(now_s)
        if expired and self._peers is not None:
            self._tell(self._peers.expired_leases, CheckExpired(trajectory_ids=expired))

    def _log_stall(self, status: GetSchedulerStatusResponse, now_s: float) -> None:
        """Log a stall when it begins, when its cause changes, and every `STALL_LOG_S`."""
        cause = status.stall.cause
        if cause == self._logged_cause and now_s < self._log_again_s:
            return
        if cause:
            self._log_again_s = now_s + STALL_LOG_S
            log.warning(
                "training_stalled",
                cause=cause,
                reason=status.stall.text,
                untrained_s=round(status.untrained_s),
            )
        elif self._logged_cause:
            log.info("training_resumed")
        self._logged_cause = cause

    def _send_final_states(self) -> None:
        self._final_states += self._state.take_final_states(now_s=self._clock())
        if not self._final_states or self._peers is None:
            return
        by_shard: defaultdict[str, list[GroupStateChange]] = defaultdict(list)
        for shard, change in self._final_states:
            by_shard[shard].append(change)
        if self._tell(self._peers.outcome_writer, StoreFinalStates(changes=by_shard)):
            self._final_states = []

    def _tell(self, other: Any, message: Any) -> bool:
        """False while its mailbox is full; the caller sends the message again later."""
        try:
            other.tell(message)
        except (MailboxFull, ActorStopped):
            return False
        return True

    def _set_timer(self) -> None:
        if self._peers is None:
            return
        now_s = self._clock()
        pause_s = MAX_TICK_S
        next_s = self._state.queue.next_event_s(now_s)
        if next_s is not None:
            pause_s = min(pause_s, next_s - now_s)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + pause_s
        if self._timer is not None:
            if loop.time() < self._timer_due_s <= due_s:
                return
            self._timer.cancel()
        # Stored separately: timers of uvloop do not return their due time.
        self._timer_due_s = due_s
        self._tick_due_s = self._loop_time() + pause_s
        self._timer = loop.call_at(due_s, self._tell, self._peers.queue, Tick())
