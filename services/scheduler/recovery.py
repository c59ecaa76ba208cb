"""How a new leader takes office: the pool's records become the queue again.

    1. read the term record from etcd, add one, write it back (`services.scheduler.record`)
    2. wait until every pool shard that ever held a group is registered
    3. fence each shard, so that an earlier leader's writes are refused from then on
    4. scan each shard, and add every group in queue order

A shard is entered in the record before the first group is put on it, so none can be forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forge.core.groups import Attempt, AttemptState, Group, GroupSpec, Phase
from forge.core.trajectory import TaskId, parse_trajectory_id
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.shards import PoolShards

_REMIND_S = 10.0

_PHASES = {
    common_pb2.GROUP_STATE_TRAINED: Phase.TRAINED,
    common_pb2.GROUP_STATE_TOMBSTONED: Phase.TOMBSTONED,
    common_pb2.GROUP_STATE_EVALUATED: Phase.EVALUATED,
}
_ATTEMPTS = {
    common_pb2.TRAJECTORY_STATE_SEALED: AttemptState.SEALED,
    common_pb2.TRAJECTORY_STATE_ABANDONED: AttemptState.ABANDONED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group as the pool has it."""

    record: common_pb2.GroupRecord
    group: Group
    summaries: Sequence[common_pb2.TrajectorySummary]


async def wait_for_shards(
    shards: PoolShards, known: frozenset[str], *, lost: frozenset[str]
) -> None:
    """Until every known shard but the lost is registered, and at least one is."""
    while not shards.live() or known - lost - shards.live():
        missing = sorted(known - lost - shards.live())
        log.warning("waiting_for_pool_shards", missing=missing or "any")
        try:
            async with asyncio.timeout(_REMIND_S):
                await shards.changed()
        except TimeoutError:
            continue


async def enlist(shards: PoolShards, names: Iterable[str]) -> list[StoredGroup]:
    """Fence and scan shards; their groups in queue order."""
    found: list[StoredGroup] = []
    for shard in sorted(names):
        await shards.raise_fence(shard)
        on_shard = [stored_group(response) async for response in shards.scan(shard)]
        found += on_shard
        log.info("pool_shard_enlisted", pool_shard=shard, groups=len(on_shard))
    found.sort(key=lambda stored: stored.record.queue_index)
    return found


def new_group(record: common_pb2.GroupRecord) -> Group:
    """A group nobody has sampled yet."""
    return Group(_spec(record))


def stored_group(response: pool_pb2.ScanGroupsResponse) -> StoredGroup:
    """A group as an earlier term left it."""
    record = response.group
    group = Group(_spec(record))
    group.recall(map(_attempt, response.trajectories))
    group.phase = _PHASES.get(record.state, Phase.QUEUED)
    if group.phase is not Phase.QUEUED:
        group.batch_id, group.step, group.reason = record.batch_id, record.step, record.reason
        group.close()
    return StoredGroup(record=record, group=group, summaries=response.trajectories)


def _spec(record: common_pb2.GroupRecord) -> GroupSpec:
    task = record.task
    return GroupSpec(
        task_id=TaskId(task.task_id),
        index=record.queue_index,
        domain=task.domain,
        shard=record.pool_shard,
        size=task.group_size,
        evaluation=task.purpose == common_pb2.PURPOSE_EVAL,
        difficulty=task.difficulty,
        priority=task.priority,
    )


def _attempt(summary: common_pb2.TrajectorySummary) -> Attempt:
    name = parse_trajectory_id(summary.trajectory_id)
    state = _ATTEMPTS.get(summary.state, AttemptState.OPEN)
    return Attempt(name.rollout_index, name.attempt, state)
