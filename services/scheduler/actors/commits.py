"""Stores commits, releases, rewinds, and what an operator sets: the activity, drains of runners.

Owns their order: one change at a time, written to the pool first and applied to the queue second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from forge.core.queue.groups import FREED
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.scheduler.groups.group_look_up import ask_with_look_up
from services.scheduler.shards.pool_shards import GroupStateChange, PoolShards
from services.scheduler.state.draining_runners import (
    ApplyDrains,
    SetRunnerDraining,
    changed_drains,
)
from services.scheduler.state.messages.batches import (
    ApplyCommit,
    ApplyRelease,
    ApplyRewind,
    CommitBatch,
    FindForgotten,
    PrepareRelease,
    PrepareRewind,
    RecallGroups,
    ReleaseBatch,
    Rewind,
    RewindPlan,
)
from services.scheduler.state.messages.groups import DropGroups
from services.scheduler.state.messages.term import NoteHead, SetActivity
from services.scheduler.state.stored_group import StoredGroup, stored_group
from services.scheduler.term_record import OwnRecord

ASK_S = 10.0


class CommitActor(Actor):
    """Writes group states to the pool, then applies them to the queue."""

    mailbox_size: ClassVar[int] = 4096

    def __init__(self, queue: ActorRef, shards: PoolShards, record: OwnRecord) -> None:
        self._queue = queue
        self._shards = shards
        self._record = record
        self._noted_head = -1
        """The head in the term record."""

    async def receive(self, message: Any) -> Any:
        """Handles CommitBatch, ReleaseBatch, DropGroups, Rewind, NoteHead, SetActivity and
        SetRunnerDraining."""
        match message:
            case CommitBatch():
                return await self._commit(message)
            case ReleaseBatch():
                return await self._release(message)
            case Rewind(step=step, fence=fence):
                if fence:
                    await self._record.raise_trainer_fence(fence)
                return await self._rewind(step)
            case NoteHead():
                head: int = await self._queue.ask(message, timeout_s=ASK_S)
                if head != self._noted_head:
                    await self._record.amend(head=head)
                    self._noted_head = head
                return None
            case DropGroups():
                return await self._drop(message)
            case SetActivity(activity=activity):
                await self._record.amend(activity=activity)
                log.info("activity_set", activity=activity.value)
                return await self._queue.ask(message, timeout_s=ASK_S)
            case SetRunnerDraining():
                return await self._set_runner_draining(message)
            case _:
                return await super().receive(message)

    async def _set_runner_draining(self, request: SetRunnerDraining) -> int:
        stored = (await self._record.read()).draining_runners
        drains = changed_drains(stored, request)
        if drains != stored:
            # The record first: a leader that takes over between the two keeps the drain.
            await self._record.amend(draining_runners=drains)
            log.info(
                "runner_drained" if request.draining else "runner_resumed",
                runner_id=request.runner_id,
            )
        apply = ApplyDrains(start_ids=drains, runner_id=request.runner_id)
        leases: int = await self._queue.ask(apply, timeout_s=ASK_S)
        return leases

    async def _commit(self, request: CommitBatch) -> None:
        trained = common_pb2.GROUP_STATE_TRAINED
        groups = await ask_with_look_up(self._queue, self._shards, request, timeout_s=ASK_S)
        if not groups:
            return
        of_batch = partial(
            GroupStateChange, state=trained, batch_id=request.batch_id, step=request.step
        )
        await self._shards.set_states(_changes(groups, of_batch))
        apply = ApplyCommit(batch_id=request.batch_id, step=request.step)
        await self._queue.ask(apply, timeout_s=ASK_S)
        log.info("batch_committed", batch_id=request.batch_id, step=request.step)

    async def _release(self, request: ReleaseBatch) -> None:
        reasons: dict[str, str] = {}
        if request.reason or request.reasons:
            prepare = PrepareRelease(batch_id=request.batch_id)
            groups: Mapping[str, Sequence[str]] = await self._queue.ask(prepare, timeout_s=ASK_S)
            task_ids = [task_id for ids in groups.values() for task_id in ids]
            by_task = request.reasons or dict.fromkeys(task_ids, request.reason)
            reasons = {task_id: by_task[task_id] for task_id in task_ids if task_id in by_task}
            tombstoned = {
                s: [task_id for task_id in ids if task_id in reasons] for s, ids in groups.items()
            }
            state = common_pb2.GROUP_STATE_TOMBSTONED
            changes = _changes(tombstoned, partial(GroupStateChange, state=state))
            for change in chain.from_iterable(changes.values()):
                change.reason = reasons[change.task_id]
            await self._shards.set_states(changes)
        apply = ApplyRelease(batch_id=request.batch_id, reasons=reasons)
        await self._queue.ask(apply, timeout_s=ASK_S)

    async def _drop(self, request: DropGroups) -> int:
        groups: dict[str, list[str]] = await self._queue.ask(request, timeout_s=ASK_S)
        state = common_pb2.GROUP_STATE_TOMBSTONED
        tombstone = partial(GroupStateChange, state=state, reason=request.reason)
        await self._shards.set_states(_changes(groups, tombstone))
        task_ids = tuple(chain.from_iterable(groups.values()))
        kept: dict[str, list[GroupStateChange]] = await self._queue.ask(
            DropGroups(task_ids=task_ids, reason=request.reason, stored=True), timeout_s=ASK_S
        )
        if kept:
            # A batch took them during the write: no commit of it can come before this one ends.
            await self._shards.set_states(kept)
        dropped = len(task_ids) - sum(map(len, kept.values()))
        log.info("groups_dropped", groups=dropped, reason=request.reason)
        return dropped

    async def _recall(self, step: int) -> None:
        """Read groups that were trained after a step and are not in memory back into the queue."""
        shards = await self._queue.ask(FindForgotten(step=step), timeout_s=ASK_S)
        groups: list[StoredGroup] = []
        for shard in sorted(shards):
            async for response in self._shards.scan(shard, trained_after=step):
                record = response.group
                if record.state == common_pb2.GROUP_STATE_TRAINED and record.step > step:
                    groups.append(stored_group(response, counted=True))
        if shards:
            log.info("rewind_groups_restored", step=step, groups=len(groups))
            await self._queue.ask(RecallGroups(groups=groups, step=step), timeout_s=ASK_S)

    async def _rewind(self, step: int) -> int:
        await self._recall(step)
        plan: RewindPlan = await self._queue.ask(PrepareRewind(step=step), timeout_s=ASK_S)
        # The record first: a new leader that takes over between the two writes must refuse steps of
        # the replaced trainer.
        self._noted_head = plan.head
        await self._record.amend(void_before=plan.void_before, head=plan.head)
        pending = partial(GroupStateChange, state=common_pb2.GROUP_STATE_PENDING)
        freed = await self._shards.set_states(
            _changes(plan.groups, pending), tombstone_freed=step == 0
        )
        undone: int = await self._queue.ask(ApplyRewind(step=step), timeout_s=ASK_S)
        if freed:
            # The pool has their tombstones; a run that starts over has nothing of theirs to read.
            drop = DropGroups(task_ids=freed, reason=FREED, stored=True)
            await self._queue.ask(drop, timeout_s=ASK_S)
            log.warning("freed_groups_tombstoned", groups=len(freed))
        log.info("rewound", step=step, groups=undone)
        return undone


def _changes(
    groups: Mapping[str, Sequence[str]], make: Callable[..., GroupStateChange]
) -> dict[str, list[GroupStateChange]]:
    return {shard: [make(task_id=task_id) for task_id in ids] for shard, ids in groups.items()}
