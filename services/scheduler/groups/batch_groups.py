"""Groups in answers, with the trajectories that the pool has of them."""

from __future__ import annotations

from collections.abc import Sequence

from forge.runtime.rpc.chunks import chunked
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.state.messages.batches import GroupView

MAX_ANSWER_BYTES = 4 << 20
"""A message has room for more: the frames of the groups, and the id of the batch."""
PAGE_TRAJECTORIES = 16_384
"""Most trajectories that a call reads for a page: a bound on its time."""
_SEALED = common_pb2.TRAJECTORY_STATE_SEALED


async def with_summaries(
    shards: PoolShards, views: Sequence[GroupView]
) -> list[scheduler_pb2.BatchGroup]:
    """Groups with their readable trajectories. Raises Unavailable."""
    by_shard: dict[str, list[str]] = {}
    for view in views:
        by_shard.setdefault(view.record.pool_shard, []).extend(view.trajectory_ids)
    summaries = await shards.summaries({s: ids for s, ids in by_shard.items() if ids})
    return [
        scheduler_pb2.BatchGroup(
            group=view.record,
            trajectories=[summaries[t] for t in view.trajectory_ids if t in summaries],
            phase=view.phase,
        )
        for view in views
    ]


def lost_trajectories(
    views: Sequence[GroupView], groups: Sequence[scheduler_pb2.BatchGroup]
) -> dict[str, str]:
    """By task id, the losses of the pool in groups that were complete.

    A leader that did not see a group complete knows only the trajectories that the pool has.
    """
    lost = {}
    for view, group in zip(views, groups, strict=True):
        task, shard = view.record.task, view.record.pool_shard
        sealed = {t.trajectory_id for t in group.trajectories if t.state == _SEALED}
        missing = [t for t in view.trajectory_ids if t not in sealed]
        if missing:
            lost[task.task_id] = f"pool shard {shard} has lost {missing[0]}"
        elif len(sealed) < task.group_size:
            known = f"{len(sealed)} of {task.group_size} trajectories"
            lost[task.task_id] = f"pool shard {shard} has {known}"
    return lost


def page_of(views: Sequence[GroupView], first_group: int) -> Sequence[GroupView]:
    """The groups from index `first_group` on that may fit a message; at least one, if any is
    left."""
    pages = chunked(
        views[first_group:],
        size_of=lambda view: len(view.trajectory_ids),
        max_bytes=PAGE_TRAJECTORIES,
    )
    return next(pages, [])


def first_fitting(
    groups: Sequence[scheduler_pb2.BatchGroup],
) -> Sequence[scheduler_pb2.BatchGroup]:
    """The first groups that one answer holds; at least one, since a message holds the largest. If
    not all fit, without rewards."""
    pages = chunked(
        fitting(groups), size_of=scheduler_pb2.BatchGroup.ByteSize, max_bytes=MAX_ANSWER_BYTES
    )
    return next(pages, [])


def fitting(groups: Sequence[scheduler_pb2.BatchGroup]) -> Sequence[scheduler_pb2.BatchGroup]:
    """The groups of one answer, without rewards if they would not fit a message: the trajectories
    have them."""
    if sum(group.ByteSize() for group in groups) > MAX_ANSWER_BYTES:
        for group in groups:
            for trajectory in group.trajectories:
                del trajectory.rewards[:]
                trajectory.reason = ""
    return groups
