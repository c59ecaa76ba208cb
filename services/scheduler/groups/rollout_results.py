"""Settles the results of rollouts that a runner reports, each by itself.

Owns the order: the queue locates the trajectories, their pool shards have the seals, the queue
settles them. An unknown trajectory, or a shard that does not answer, holds back no other result.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.runtime.actors.actor_system import ActorRef
from forge.v1 import scheduler_pb2
from services.scheduler import validation
from services.scheduler.groups.group_look_up import ask_with_look_up
from services.scheduler.shards.pool_shards import PoolShards, gathered
from services.scheduler.state.messages.rollouts import (
    AttemptReport,
    FindUnknown,
    Located,
    LocateRollouts,
    SettleRollouts,
)

ASK_S = 10.0
_Result = scheduler_pb2.FinishRolloutsRequest.Outcome


async def settle_results(
    queue: ActorRef, shards: PoolShards, results: Sequence[_Result]
) -> list[scheduler_pb2.FinishRolloutsResponse.Refusal]:
    """Returns the refusals of unknown trajectories. Raises InvalidArgument before anything is
    settled; Unavailable, with the others settled, if a shard that has a trajectory, or may have it,
    does not answer."""
    by_id = {validation.check_result(result, n): result for n, result in enumerate(results)}
    located: Located = await queue.ask(LocateRollouts(trajectory_ids=tuple(by_id)), timeout_s=ASK_S)

    async def settle(shard: str, ids: Sequence[str]) -> None:
        summaries = await shards.summaries({shard: ids})
        reports = [
            AttemptReport(
                trajectory_id=each,
                error=by_id[each].error[: validation.MAX_ERROR_CHARS],
                permanent=by_id[each].permanent,
                kind=validation.failure_kind(by_id[each].kind),
                # The pool is authoritative: a sealed rollout is complete, also if its runner
                # failed.
                summary=summaries.get(each),
            )
            for each in ids
        ]
        await queue.ask(SettleRollouts(reports=reports), timeout_s=ASK_S)

    await gathered(settle(shard, ids) for shard, ids in located.by_shard.items())
    unknown = dict(located.unknown)
    if located.absent:
        find = FindUnknown(trajectory_ids=located.absent)
        unknown |= await ask_with_look_up(queue, shards, find, timeout_s=ASK_S)
    return [
        scheduler_pb2.FinishRolloutsResponse.Refusal(trajectory_id=each, error=why)
        for each, why in unknown.items()
    ]
