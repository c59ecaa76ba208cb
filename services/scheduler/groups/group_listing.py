"""Lists the groups of a tag: those in memory, and settled groups that only the pool has.

Owns the reads of the latter, by the tag index of the shards; a list without a tag scans the shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing

from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.rpc.chunks import batched
from forge.v1 import common_pb2
from services.scheduler.shards.pool_shards import ShardScans
from services.scheduler.state.messages.batches import GroupView
from services.scheduler.state.messages.groups import ListTagged, Tagged, ViewGroups
from services.scheduler.state.stored_group import PHASES, StoredGroup, stored_group
from services.scheduler.state.task_catalog import record_of

ASK_S = 10.0
LIST_GROUPS = 64
"""In one part."""


async def list_groups(
    queue: ActorRef, shards: ShardScans, tag: str, *, newest: int = 0
) -> AsyncIterator[Sequence[GroupView]]:
    """Every group of a tag, or every group without a tag, in parts: first those that only the pool
    has, in queue order, then those in memory. With `newest` only so many, the last ones: the pool
    is read if memory has fewer. Raises Unavailable."""
    listed: Tagged = await queue.ask(ListTagged(tag=tag), timeout_s=ASK_S)
    in_memory = set(listed.task_ids)
    chosen = listed.task_ids[-newest:] if newest else listed.task_ids

    def is_beyond(record: common_pb2.GroupRecord) -> bool:
        fits = record.task.tag == tag or not tag
        return fits and record.state in PHASES and record.task.task_id not in in_memory

    if not newest or len(chosen) < newest:
        stored = _stored(shards, listed.shards, tag, is_beyond)
        async for part in _last(stored, newest - len(chosen)) if newest else stored:
            yield part
    missed: set[str] = set()
    for task_ids in batched(chosen, LIST_GROUPS):
        views = await queue.ask(ViewGroups(task_ids=task_ids), timeout_s=ASK_S)
        missed |= set(task_ids) - {view.record.task.task_id for view in views}
        yield views
    if missed:
        # These groups left memory in between.
        listed = await queue.ask(ListTagged(tag=tag), timeout_s=ASK_S)

        def is_missed(record: common_pb2.GroupRecord) -> bool:
            return record.task.task_id in missed

        async for part in _stored(shards, listed.shards, tag, is_missed):
            yield part


async def _stored(
    shards: ShardScans,
    names: Iterable[str],
    tag: str,
    wanted: Callable[[common_pb2.GroupRecord], bool],
) -> AsyncIterator[Sequence[GroupView]]:
    part: list[GroupView] = []
    async with AsyncExitStack() as stack:
        scans = [
            await stack.enter_async_context(aclosing(_scan(shards, shard, tag, wanted)))
            for shard in sorted(names)
        ]
        firsts = [(scan, await anext(scan, None)) for scan in scans]
        left = {scan: first for scan, first in firsts if first is not None}
        while left:
            scan = min(left, key=lambda candidate: left[candidate].place)
            part.append(_view(left[scan]))
            if len(part) == LIST_GROUPS:
                yield part
                part = []
            following = await anext(scan, None)
            if following is None:
                del left[scan]
            else:
                left[scan] = following
    if part:
        yield part


async def _last(
    parts: AsyncIterator[Sequence[GroupView]], count: int
) -> AsyncIterator[Sequence[GroupView]]:
    """The last groups of all parts, in parts."""
    kept: deque[GroupView] = deque(maxlen=count)
    async for part in parts:
        kept.extend(part)
    for views in batched(list(kept), LIST_GROUPS):
        yield views


async def _scan(
    shards: ShardScans, shard: str, tag: str, wanted: Callable[[common_pb2.GroupRecord], bool]
) -> AsyncGenerator[StoredGroup, None]:
    async with aclosing(shards.scan(shard, tag=tag)) as responses:
        async for response in responses:
            if response.HasField("group") and wanted(response.group):
                yield stored_group(response)


def _view(stored: StoredGroup) -> GroupView:
    record = record_of(stored.group, stored.entry)
    return GroupView(
        record=record,
        trajectory_ids=stored.group.sealed_ids(),
        phase=stored.group.phase.value,
    )
