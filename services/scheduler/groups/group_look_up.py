"""Asks the queue about groups that may be only in the pool: look up, then ask again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forge.runtime.actors.actor_system import ActorRef
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.state.messages.batches import CommitBatch
from services.scheduler.state.messages.groups import FindNew, LookedUp, LookUp
from services.scheduler.state.messages.rollouts import FindUnknown


async def ask_with_look_up(
    queue: ActorRef,
    shards: PoolShards,
    message: FindNew | FindUnknown | CommitBatch,
    *,
    timeout_s: float,
) -> Any:
    """The answer of the queue. Raises its errors, and Unavailable if a group is not found and a
    shard that may have it does not answer."""
    while True:
        answer = await queue.ask(message, timeout_s=timeout_s)
        if not isinstance(answer, LookUp):
            return answer
        groups, commits = await shards.look_up(
            answer.shards, task_ids=answer.task_ids, batch_ids=answer.batch_ids
        )
        known = message.looked_up
        message = replace(
            message,
            looked_up=LookedUp(
                task_ids=known.task_ids.union(answer.task_ids),
                batch_ids=known.batch_ids.union(answer.batch_ids),
                groups={**known.groups, **groups},
                commits={**known.commits, **commits},
            ),
        )
