"""Accepts new groups; no other actor does.

Owns the queue indices. It handles one submission at a time, so indices follow the order in which
groups become durable. A group whose write ended in doubt keeps its index and its shard until it is
submitted again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from forge.core.errors import InvalidArgument, ResourceExhausted, Unavailable
from forge.core.placement.sharding import choose_shard
from forge.core.tasks.task_digest import task_digest
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.scheduler.groups.group_look_up import ask_with_look_up
from services.scheduler.shards.pool_shards import PoolShards, gathered
from services.scheduler.state.messages.groups import AddGroups, FindNew, ReserveIndices, Submit

ASK_S = 10.0
RETRY_S = 5.0
MAX_UNSETTLED = 65_536
"""Maximum number of groups with an unconfirmed write."""


class SubmissionActor(Actor):
    """Stores new groups, then gives them to the queue."""

    def __init__(
        self,
        queue: ActorRef,
        shards: PoolShards,
        *,
        next_index: Mapping[int, int],
        placeable: Callable[[], Collection[str]],
        reachable: Callable[[], Collection[str]],
    ) -> None:
        """`next_index` by purpose; `placeable`: the shards that accept new groups now;
        `reachable`: those that answer, also for groups whose write ended in doubt."""
        self._queue = queue
        self._shards = shards
        self._next_index = dict(next_index)
        self._placeable = placeable
        self._reachable = reachable
        self._unsettled: dict[str, common_pb2.GroupRecord] = {}

    async def receive(self, message: Any) -> Any:
        """Handles Submit and ReserveIndices."""
        match message:
            case Submit(tasks=tasks):
                return await self._submit(tasks)
            case ReserveIndices(next_index=next_index):
                for purpose, index in next_index.items():
                    self._next_index[purpose] = max(self._next_index[purpose], index)
                return None
            case _:
                return await super().receive(message)

    async def _submit(self, tasks: Mapping[str, common_pb2.Task]) -> int:
        find = FindNew(tasks=tasks, uncertain=frozenset(self._unsettled))
        fresh = await ask_with_look_up(self._queue, self._shards, find, timeout_s=ASK_S)
        unsettled = self._unsettled.keys() | {task.task_id for task in fresh}
        if len(unsettled) > MAX_UNSETTLED:
            raise ResourceExhausted(
                f"the pool did not confirm the writes of {len(self._unsettled)} groups: submit "
                "those again first",
                retry_after_s=RETRY_S,
            )
        by_shard: defaultdict[str, list[common_pb2.GroupRecord]] = defaultdict(list)
        for record in [self._record(task) for task in fresh]:
            self._unsettled[record.task.task_id] = record
            by_shard[record.pool_shard].append(record)
        await gathered(self._store(shard, records) for shard, records in by_shard.items())
        if fresh:
            log.info("groups_accepted", groups=len(fresh))
        return len(fresh)

    async def _store(self, shard: str, records: Sequence[common_pb2.GroupRecord]) -> None:
        await self._shards.put_groups(shard, records)
        # These are durable, so they count even if another shard refuses its part.
        await self._queue.ask(AddGroups(records=records), timeout_s=ASK_S)
        for record in records:
            del self._unsettled[record.task.task_id]

    def _record(self, task: common_pb2.Task) -> common_pb2.GroupRecord:
        record = self._unsettled.get(task.task_id)
        if record is not None:
            if task_digest(record.task) != task_digest(task):
                raise InvalidArgument(
                    f"task_id {task.task_id!r} was submitted before with different content"
                )
            if record.pool_shard not in self._reachable():
                raise Unavailable(
                    f"task_id {task.task_id!r} may be stored on pool shard {record.pool_shard}, "
                    "which is unreachable"
                )
            return record
        index = self._next_index[task.purpose]
        record = common_pb2.GroupRecord(
            task=task,
            queue_index=index,
            state=common_pb2.GROUP_STATE_PENDING,
            pool_shard=choose_shard(task.task_id, self._placeable()),
            task_digest=task_digest(task),
        )
        self._next_index[task.purpose] = index + 1
        return record
