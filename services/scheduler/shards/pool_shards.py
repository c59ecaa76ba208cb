"""Calls to the pool shards: scans for every instance, fenced writes and summaries for the leader.

Owns the calls and their fence; the actors and `leadership` decide when to call. Every write checks
leadership first and carries the fence: a shard refuses a deposed leader, even one that does not
know it yet.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.core.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    StaleFence,
    Unavailable,
)
from forge.runtime.coordination import Discovery, Instance, Leadership
from forge.runtime.rpc.chunks import batched, chunked
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.streams import flowing
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2

if TYPE_CHECKING:
    from forge.v1.pool_pb2_grpc import PoolServiceAsyncStub

MAX_WRITE_BYTES = 2 << 20
MAX_WRITE_GROUPS = 512
MAX_SUMMARIES = 1024
MAX_LOOKED_UP = 4096
IMPORT_S = 300.0
"""Deadline of a copy of groups between shards."""

GroupStateChange = pool_pb2.SetGroupStatesRequest.Change


def shard_of(instance: Instance) -> str:
    """The pool shard that an instance serves."""
    return instance.metadata.get("shard", instance.instance_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """The newest fence and term that leaders have written with."""

    fence: int
    term: int


class ShardScans:
    """Scans of every pool shard."""

    def __init__(
        self, discovery: Discovery, remote: Remote[PoolServiceAsyncStub], *, timeout_s: float
    ) -> None:
        self._discovery = discovery
        self._remote = remote
        self._timeout_s = timeout_s
        self._gone: set[str] = set()
        """Lineages of stores that were retired or declared lost."""

    def live(self) -> frozenset[str]:
        """Shards that are registered now, without those that are gone."""
        return frozenset(
            shard_of(instance)
            for instance in self._discovery.instances
            if instance.metadata.get("lineage") not in self._gone
        )

    def forget_store(self, lineage: str) -> None:
        """Forget a store that was retired or declared lost: it counts as not registered."""
        self._gone.add(lineage)

    def changed(self) -> Coroutine[Any, Any, None]:
        """Return an awaitable for the next shard that joins or leaves after this call."""
        return self._discovery.changed()

    async def scan(
        self, shard: str, **wanted: Any
    ) -> AsyncGenerator[pool_pb2.ScanGroupsResponse, None]:
        """Yields the answers of ScanGroups; `wanted`: fields of its request, see pool.proto. A
        shard of an earlier version ignores those that it does not know.

        Raises Unavailable, and DeadlineExceeded when the shard sends nothing for one call's time.
        """
        _, stub = await self._remote.pick(where=lambda i: shard_of(i) == shard)
        groups = stub.ScanGroups(pool_pb2.ScanGroupsRequest(together=True, **wanted))
        async for response in flowing(
            groups, silence_s=self._timeout_s, source=f"pool shard {shard}"
        ):
            yield response
            for following in response.more:
                yield following


class PoolShards(ShardScans):
    """Every pool shard, in one leader's term."""

    def __init__(
        self,
        discovery: Discovery,
        remote: Remote[PoolServiceAsyncStub],
        leadership: Leadership,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(discovery, remote, timeout_s=timeout_s)
        self._leadership = leadership
        self._relocated: dict[str, str] = {}
        """By task: the shard to which its pending group moved in this term."""

    async def floors(self, names: Iterable[str]) -> Floors:
        """Return the newest fence and term that shards know. Raises Unavailable."""
        request = pool_pb2.LookUpGroupsRequest()
        answers = await gathered(self._call(shard, "LookUpGroups", request) for shard in names)
        return Floors(
            fence=max((answer.fence for answer in answers), default=0),
            term=max((answer.term for answer in answers), default=0),
        )

    async def raise_fence(self, shard: str, *, term: int) -> None:
        """Make the shard refuse writes of every earlier leader from now on, and store the number of
        the term."""
        await self._set_states(shard, (), term=term)

    async def put_groups(self, shard: str, groups: Iterable[common_pb2.GroupRecord]) -> None:
        """Store new groups, in order. Raises Unavailable."""
        parts = chunked(
            groups,
            size_of=common_pb2.GroupRecord.ByteSize,
            max_items=MAX_WRITE_GROUPS,
            max_bytes=MAX_WRITE_BYTES,
        )
        for part in parts:
            self._check_leadership()
            request = pool_pb2.PutGroupsRequest(groups=part, fence=self._leadership.fence)
            await self._call(shard, "PutGroups", request)

    async def set_states(
        self, changes: Mapping[str, Sequence[GroupStateChange]], *, tombstone_freed: bool = False
    ) -> list[str]:
        """Store the states of groups, by shard, in atomic parts of at most `MAX_WRITE_GROUPS`. With
        `tombstone_freed` the tasks whose freed groups are tombstoned instead of pending. Raises the
        first error after every part was tried."""
        freed = await gathered(
            self._set_states(shard, part, tombstone_freed=tombstone_freed)
            for shard, changed in self._by_present_shard(changes).items()
            for part in batched(changed, MAX_WRITE_GROUPS)
        )
        return [task_id for part in freed for task_id in part]

    def relocate(self, task_ids: Iterable[str], target: str) -> None:
        """Pending groups moved to another shard: later states go there."""
        self._relocated.update(dict.fromkeys(task_ids, target))

    def _by_present_shard(
        self, changes: Mapping[str, Sequence[GroupStateChange]]
    ) -> Mapping[str, Sequence[GroupStateChange]]:
        if not self._relocated:
            return changes
        by_shard: defaultdict[str, list[GroupStateChange]] = defaultdict(list)
        for shard, changed in changes.items():
            for change in changed:
                by_shard[self._relocated.get(change.task_id, shard)].append(change)
        return by_shard

    async def list_to_move(self, shard: str, *, limit: int) -> pool_pb2.ListGroupsToMoveResponse:
        """Groups of a shard that did not move, settled ones first."""
        request = pool_pb2.ListGroupsToMoveRequest(limit=limit)
        answer: pool_pb2.ListGroupsToMoveResponse = await self._call(
            shard, "ListGroupsToMove", request
        )
        return answer

    async def import_groups(
        self, target: str, source: str, task_ids: Sequence[str]
    ) -> Sequence[pool_pb2.GroupDigest]:
        """Copy groups to a shard; those that the source still has."""
        self._check_leadership()
        request = pool_pb2.ImportGroupsRequest(
            source_shard=source, task_ids=task_ids, fence=self._leadership.fence
        )
        answer = await self._call(target, "ImportGroups", request, timeout_s=IMPORT_S)
        return list(answer.groups)

    async def mark_moved(
        self, source: str, target: str, groups: Sequence[pool_pb2.GroupDigest]
    ) -> set[str]:
        """Mark groups at their source; the tasks whose groups are moved now."""
        self._check_leadership()
        request = pool_pb2.MarkGroupsMovedRequest(
            groups=groups, target_shard=target, fence=self._leadership.fence
        )
        return set((await self._call(source, "MarkGroupsMoved", request)).moved)

    async def look_up(
        self, names: Iterable[str], *, task_ids: Sequence[str], batch_ids: Sequence[str]
    ) -> tuple[dict[str, common_pb2.GroupRecord], dict[str, int]]:
        """Groups by task id and steps by batch id, of those that the shards have. Raises
        Unavailable if some are missing and a shard does not answer."""
        answers = await asyncio.gather(
            *(self._look_up(shard, task_ids, batch_ids) for shard in names),
            return_exceptions=True,
        )
        groups: dict[str, common_pb2.GroupRecord] = {}
        commits: dict[str, int] = {}
        errors: list[BaseException] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                errors.append(answer)
                continue
            groups |= {group.task.task_id: group for group in answer.groups}
            commits |= {commit.batch_id: commit.step for commit in answer.commits}
        if errors and (set(task_ids) - groups.keys() or set(batch_ids) - commits.keys()):
            raise errors[0]
        return groups, commits

    async def _look_up(
        self, shard: str, task_ids: Sequence[str], batch_ids: Sequence[str]
    ) -> pool_pb2.LookUpGroupsResponse:
        merged = pool_pb2.LookUpGroupsResponse()
        if shard not in self.live():
            raise Unavailable(f"pool shard {shard} is unreachable and may have the group")
        left = [*((True, each) for each in task_ids), *((False, each) for each in batch_ids)]
        while left:
            part = left[:MAX_LOOKED_UP]
            request = pool_pb2.LookUpGroupsRequest(
                task_ids=[each for is_task, each in part if is_task],
                batch_ids=[each for is_task, each in part if not is_task],
            )
            answer = await self._call(shard, "LookUpGroups", request)
            merged.MergeFrom(answer)
            left = left[answer.answered :]
        return merged

    async def summaries(
        self, trajectory_ids: Mapping[str, Sequence[str]]
    ) -> dict[str, common_pb2.TrajectorySummary]:
        """Return summaries by trajectory id, from ids by shard. Unknown and unreadable trajectories
        are omitted."""
        answers = await gathered(
            self._summaries(shard, part)
            for shard, ids in trajectory_ids.items()
            for part in batched(ids, MAX_SUMMARIES)
        )
        return {summary.trajectory_id: summary for answer in answers for summary in answer}

    async def _summaries(
        self, shard: str, trajectory_ids: Sequence[str]
    ) -> list[common_pb2.TrajectorySummary]:
        request = pool_pb2.GetSummariesRequest(trajectory_ids=trajectory_ids)
        try:
            answer = await self._call(shard, "GetSummaries", request)
        except (DataLoss, InvalidArgument) as error:
            # One damaged record fails the whole request, as does an answer beyond the message
            # limit: retry each half.
            if len(trajectory_ids) == 1:
                if isinstance(error, InvalidArgument):
                    raise
                log.debug("trajectory_unreadable", pool_shard=shard, error=str(error))
                return []
            middle = len(trajectory_ids) // 2
            first = await self._summaries(shard, trajectory_ids[:middle])
            return first + await self._summaries(shard, trajectory_ids[middle:])
        return list(answer.summaries)

    async def _set_states(
        self,
        shard: str,
        changes: Sequence[GroupStateChange],
        *,
        term: int = 0,
        tombstone_freed: bool = False,
    ) -> Sequence[str]:
        self._check_leadership()
        request = pool_pb2.SetGroupStatesRequest(
            changes=changes,
            fence=self._leadership.fence,
            term=term,
            tombstone_freed=tombstone_freed,
        )
        return list((await self._call(shard, "SetGroupStates", request)).freed)

    async def _call(
        self, shard: str, method: str, request: Any, *, timeout_s: float | None = None
    ) -> Any:
        try:
            return await self._remote.call(
                method,
                request,
                timeout_s=self._timeout_s if timeout_s is None else timeout_s,
                retry_for_s=self._timeout_s,
                where=lambda instance: shard_of(instance) == shard,
            )
        except StaleFence as error:
            # The caller gets the same error as when this instance knows: ask another leader.
            raise self._deposed() from error
        except (Unavailable, DeadlineExceeded) as error:
            raise Unavailable(f"pool shard {shard} does not answer: {error}") from error

    def _check_leadership(self) -> None:
        if not self._leadership.alive:
            raise self._deposed()

    def _deposed(self) -> Unavailable:
        return Unavailable("this scheduler is no longer the leader")


async def gathered(calls: Iterable[Any]) -> list[Any]:
    """All answers. Raises the first error after every call has ended, so none keeps running."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return list(answers)
