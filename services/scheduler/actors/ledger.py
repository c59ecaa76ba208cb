"""The ledger: the only one who stores what became of groups.

Owns the order of durable changes: one commit, release or rewind at a time, each written to the
pool first and told to the queue then. A shard that does not answer keeps the fates of its groups
waiting here; nothing else waits for them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forge.core.errors import ActorStopped, ForgeError, MailboxFull, Unavailable
from forge.runtime.actor import Actor, ActorRef
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.scheduler import messages as m
from services.scheduler.record import OwnRecord
from services.scheduler.shards import Change, PoolShards

ASK_S = 10.0
RETRY_FATES_S = 2.0


@dataclass(frozen=True, slots=True)
class _StoreAgain:
    """Try the fates that are waiting."""


class Ledger(Actor):
    """Writes states to the pool, then to the queue."""

    mailbox_size: ClassVar[int] = 4096

    def __init__(self, queue: ActorRef, shards: PoolShards, record: OwnRecord) -> None:
        self._queue = queue
        self._shards = shards
        self._record = record
        self._fates: defaultdict[str, list[m.Fate]] = defaultdict(list)
        self._own: ActorRef | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def receive(self, message: Any) -> Any:
        match message:
            case m.CommitBatch():
                return await self._commit(message)
            case m.ReleaseBatch():
                return await self._release(message)
            case m.Rewind(step=step):
                return await self._rewind(step)
            case m.SetActivity(activity=activity):
                await self._record.amend(activity=activity)
                log.info("activity_set", activity=activity.value)
                return await self._queue.ask(message, timeout_s=ASK_S)
            case m.StoreFates(fates=fates):
                for shard, added in fates.items():
                    self._fates[shard] += added
                return await self._store_fates()
            case _StoreAgain():
                self._timer = None
                return await self._store_fates()
            case m.Connect(ledger=own):
                self._own = own
                return None
            case _:
                return await super().receive(message)

    async def stopped(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _commit(self, request: m.CommitBatch) -> None:
        prepare = m.PrepareCommit(
            batch_id=request.batch_id, step=request.step, task_ids=request.task_ids
        )
        trained = common_pb2.GROUP_STATE_TRAINED
        groups = await self._queue.ask(prepare, timeout_s=ASK_S)
        if not groups:
            return
        await self._shards.set_states(
            _changes(groups, trained, batch_id=request.batch_id, step=request.step)
        )
        apply = m.ApplyCommit(batch_id=request.batch_id, step=request.step)
        await self._queue.ask(apply, timeout_s=ASK_S)
        log.info("batch_committed", batch_id=request.batch_id, step=request.step)

    async def _release(self, request: m.ReleaseBatch) -> None:
        if request.reason:
            prepare = m.PrepareRelease(batch_id=request.batch_id)
            groups = await self._queue.ask(prepare, timeout_s=ASK_S)
            tombstoned = common_pb2.GROUP_STATE_TOMBSTONED
            await self._shards.set_states(_changes(groups, tombstoned, reason=request.reason))
        apply = m.ApplyRelease(batch_id=request.batch_id, reason=request.reason)
        await self._queue.ask(apply, timeout_s=ASK_S)

    async def _rewind(self, step: int) -> int:
        plan: m.RewindPlan = await self._queue.ask(m.PrepareRewind(step=step), timeout_s=ASK_S)
        # The mark first: between the two, a new leader would take the step of a trainer that was
        # replaced for one that may still count.
        await self._record.amend(void_before=plan.void_before)
        await self._shards.set_states(_changes(plan.groups, common_pb2.GROUP_STATE_PENDING))
        undone: int = await self._queue.ask(m.ApplyRewind(step=step), timeout_s=ASK_S)
        log.info("rewound", step=step, groups=undone)
        return undone

    async def _store_fates(self) -> None:
        for shard in tuple(self._fates):
            fates = self._fates[shard]
            changes = [
                Change(task_id=fate.task_id, state=fate.state, reason=fate.reason) for fate in fates
            ]
            try:
                await self._shards.set_states({shard: changes})
            except Unavailable as error:
                log.warning("fates_wait", pool_shard=shard, groups=len(fates), error=str(error))
                continue
            except ForgeError as error:
                # Not durable, so the next leader will settle these groups anew.
                log.error("fates_refused", pool_shard=shard, groups=len(fates), error=str(error))
            del self._fates[shard]
        if self._fates and self._timer is None and self._own is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(RETRY_FATES_S, self._try_again)

    def _try_again(self) -> None:
        assert self._own is not None
        try:
            self._own.tell(_StoreAgain())
        except MailboxFull:
            self._timer = asyncio.get_running_loop().call_later(RETRY_FATES_S, self._try_again)
        except ActorStopped:
            return


def _changes(
    groups: Mapping[str, Sequence[str]],
    state: common_pb2.GroupState.ValueType,
    *,
    batch_id: str = "",
    step: int = 0,
    reason: str = "",
) -> dict[str, list[Change]]:
    return {
        shard: [
            Change(task_id=task_id, state=state, batch_id=batch_id, step=step, reason=reason)
            for task_id in task_ids
        ]
        for shard, task_ids in groups.items()
    }
