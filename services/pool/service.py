"""PoolService over gRPC: decodes requests, asks the writer or a reader, encodes answers.

Owns the open streams.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from forge.core.errors import InvalidArgument, Unavailable
from forge.core.trajectory import TrajectoryName, parse_trajectory_id
from forge.runtime.rpc.chunks import split
from forge.v1 import pool_pb2, pool_pb2_grpc, replica_pb2, replica_pb2_grpc
from services.pool import validation
from services.pool.actors.writer import WriterRef
from services.pool.data.commands import Command, SealTrajectory, SetGroupStates
from services.pool.data.reads.group_scan import Scan
from services.pool.data.reads.query import query
from services.pool.data.reads.stats import Tally
from services.pool.data.reads.text_search import search
from services.pool.erasure import Erasure, purged
from services.pool.group_mover import GroupMover
from services.pool.maintenance.compaction import Compactor
from services.pool.maintenance.purge import Purger
from services.pool.readers import ReaderRef
from services.pool.replication.replica import Replica
from services.pool.retention import Retention
from services.pool.storage.records import DamagedRecord
from services.pool.store import PoolStore
from services.pool.streams.append import COMMIT_TIMEOUT_S, AppendStream
from services.pool.streams.tail import Tails

Page = TypeVar("Page")
FULL_NAME = "forge.v1.PoolService"
REPLICA_FULL_NAME = "forge.v1.PoolReplicaService"
SCOPES = {
    # Only services write. Only administrators and a trainer's ranks read whole trajectories; only
    # administrators erase them.
    "ScanGroups": "operator",
    "LookUpGroups": "operator",
    "GetSummaries": "operator",
    "FetchTrajectories": "rank",
    "EraseTrajectories": "admin",
    "FreeArchivedGroups": "admin",
    "QueryTrajectories": "operator",
    # Its answers show contents.
    "SearchTrajectories": "admin",
    "TailTrajectories": "operator",
    "GetPoolStats": "viewer",
    "CompactShard": "operator",
}
AUDITED = frozenset({"CompactShard", "EraseTrajectories", "FreeArchivedGroups"})
"""Changes by people: calls in the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """Bounds of what senders may store."""

    max_turn_bytes: int
    max_agent_rewards: int = 0
    """Most rewards of an agent in one trajectory."""


class PoolServicer(pool_pb2_grpc.PoolServiceServicer):
    """The RPCs of one shard, as pool.proto specifies them."""

    def __init__(
        self,
        store: PoolStore,
        writer: WriterRef,
        readers: ReaderRef,
        compactor: Compactor,
        erasure: Erasure,
        moves: GroupMover,
        retention: Retention,
        limits: WriteLimits,
    ) -> None:
        self._store = store
        self._moves = moves
        self._retention = retention
        self._compactor = compactor
        self._erasure = erasure
        self._writer = writer
        self._readers = readers
        self._limits = limits
        self._streams: set[AppendStream] = set()
        self._tails = Tails(store, readers)
        self._draining = False

    async def PutGroups(
        self, request: pool_pb2.PutGroupsRequest, context: Any
    ) -> pool_pb2.PutGroupsResponse:
        """Stores new groups."""
        await self._commit(validation.put_groups(request, shard=self._store.shard), context)
        return pool_pb2.PutGroupsResponse()

    async def SetGroupStates(
        self, request: pool_pb2.SetGroupStatesRequest, context: Any
    ) -> pool_pb2.SetGroupStatesResponse:
        """Replaces states of groups."""
        command = validation.set_group_states(request, now_unix_s=time.time())
        return pool_pb2.SetGroupStatesResponse(freed=await self._commit(command, context))

    async def ScanGroups(
        self, request: pool_pb2.ScanGroupsRequest, context: Any
    ) -> AsyncIterator[pool_pb2.ScanGroupsResponse]:
        """Streams groups in queue order."""
        begin, scan = await self._readers.run(partial(begin_scan, self._store, request))
        if begin is not None:
            yield pool_pb2.ScanGroupsResponse(begin=begin)
        while (page := await self._readers.run(scan.next_page)) is not None:
            for response in _together(page) if request.together else page:
                yield response

    async def LookUpGroups(
        self, request: pool_pb2.LookUpGroupsRequest, context: Any
    ) -> pool_pb2.LookUpGroupsResponse:
        """Returns groups and commits by id."""
        validation.check_look_up(request)
        return await self._readers.run(partial(self._store.look_up, request))

    async def AppendTurns(
        self, request_iterator: AsyncIterator[pool_pb2.AppendTurnsRequest], context: Any
    ) -> AsyncIterator[pool_pb2.AppendTurnsResponse]:
        """Stores a stream of turns, with one answer per turn."""
        stream = AppendStream(self._writer, max_turn_bytes=self._limits.max_turn_bytes)
        self._streams.add(stream)
        if self._draining:
            stream.drain()
        try:
            async for response in stream.responses(request_iterator):
                yield response
        finally:
            self._streams.discard(stream)

    async def AppendRewards(
        self, request: pool_pb2.AppendRewardsRequest, context: Any
    ) -> pool_pb2.AppendRewardsResponse:
        """Stores rewards of a trajectory."""
        command = validation.append_rewards(request)
        command = replace(command, max_agent_rewards=self._limits.max_agent_rewards)
        await self._commit(command, context)
        self._tails.announce()
        return pool_pb2.AppendRewardsResponse()

    async def SealTrajectory(
        self, request: pool_pb2.SealTrajectoryRequest, context: Any
    ) -> pool_pb2.SealTrajectoryResponse:
        """Closes a trajectory."""
        command = validation.seal_trajectory(request, now_unix_s=time.time())
        command = replace(command, max_agent_rewards=self._limits.max_agent_rewards)
        summary = await self._commit(command, context)
        self._tails.announce()
        return pool_pb2.SealTrajectoryResponse(summary=summary)

    async def GetSummaries(
        self, request: pool_pb2.GetSummariesRequest, context: Any
    ) -> pool_pb2.GetSummariesResponse:
        """Returns trajectories without their turns."""
        names = [parse_trajectory_id(text) for text in request.trajectory_ids]
        summaries = await self._readers.run(partial(self._store.summaries, names))
        return pool_pb2.GetSummariesResponse(summaries=summaries)

    async def FetchTrajectories(
        self, request: pool_pb2.FetchTrajectoriesRequest, context: Any
    ) -> AsyncIterator[pool_pb2.FetchTrajectoriesResponse]:
        """Streams trajectories with their turns."""
        names = [parse_trajectory_id(text) for text in request.trajectory_ids]
        while names:
            found = await self._readers.run(partial(self._store.trajectories, names))
            for name, trajectory in zip(names, found, strict=False):
                for response in _pieces(name, trajectory):
                    yield response
            names = names[len(found) :]

    async def QueryTrajectories(
        self, request: pool_pb2.QueryTrajectoriesRequest, context: Any
    ) -> pool_pb2.QueryTrajectoriesResponse:
        """Returns one page of trajectories that fit a filter."""
        return await self._page(partial(query, request=request, shard=self._store.shard))

    async def SearchTrajectories(
        self, request: pool_pb2.SearchTrajectoriesRequest, context: Any
    ) -> pool_pb2.SearchTrajectoriesResponse:
        """Returns one page of trajectories that have a text."""
        return await self._page(partial(search, request=request, shard=self._store.shard))

    async def _page(self, look: Callable[..., Page]) -> Page:
        try:
            return await self._readers.run(partial(self._store.read, look))
        except DamagedRecord:
            # No replica has it intact: the page skips it.
            return await self._readers.run(
                partial(self._store.read, partial(look, name_damaged=True))
            )

    # A coroutine and not a generator, because it must know when a response is not taken.
    async def TailTrajectories(  # type: ignore[override]
        self, request: pool_pb2.TailTrajectoriesRequest, context: Any
    ) -> None:
        """Streams the change log as it grows."""
        await self._tails.follow(request, context.write)

    async def GetPoolStats(
        self, request: pool_pb2.GetPoolStatsRequest, context: Any
    ) -> pool_pb2.GetPoolStatsResponse:
        """Returns counts and sizes."""
        stats = await self._readers.run(self._store.stats)
        if request.by_domain:
            tally = Tally()
            while await self._readers.run(partial(self._store.read, tally.advance)):
                pass  # Slice by slice, so that other reads get a thread in between.
            tally.add_to(stats)
        return stats

    async def CompactShard(
        self, request: pool_pb2.CompactShardRequest, context: Any
    ) -> AsyncIterator[pool_pb2.CompactShardResponse]:
        """Rewrites the data file without free pages and streams the progress."""
        await self._readers.run(lambda: None)  # refused where reads are
        async with aclosing(self._compactor.run(request.data_dir)) as responses:
            async for response in responses:
                yield response

    async def ListGroupsToMove(
        self, request: pool_pb2.ListGroupsToMoveRequest, context: Any
    ) -> pool_pb2.ListGroupsToMoveResponse:
        """Returns groups that did not move to another shard."""
        return await self._moves.list_groups(request)

    async def ExportGroups(
        self, request: pool_pb2.ExportGroupsRequest, context: Any
    ) -> AsyncIterator[pool_pb2.ExportGroupsResponse]:
        """Streams all records of groups."""
        async with aclosing(self._moves.export(request)) as responses:
            async for response in responses:
                yield response

    async def ImportGroups(
        self, request: pool_pb2.ImportGroupsRequest, context: Any
    ) -> pool_pb2.ImportGroupsResponse:
        """Copies groups from another shard."""
        return await self._moves.import_groups(request)

    async def MarkGroupsMoved(
        self, request: pool_pb2.MarkGroupsMovedRequest, context: Any
    ) -> pool_pb2.MarkGroupsMovedResponse:
        """Marks groups that another shard imported."""
        return await self._moves.mark(request)

    async def FreeArchivedGroups(
        self, request: pool_pb2.FreeArchivedGroupsRequest, context: Any
    ) -> pool_pb2.FreeArchivedGroupsResponse:
        """Frees groups that an archive has."""
        validation.check_move([group.task_id for group in request.groups])
        digests = {group.task_id: group.digest for group in request.groups}
        freed = await self._retention.free_archived(digests)
        return pool_pb2.FreeArchivedGroupsResponse(freed=freed)

    async def EraseTrajectories(
        self, request: pool_pb2.EraseTrajectoriesRequest, context: Any
    ) -> pool_pb2.EraseTrajectoriesResponse:
        """Erases trajectories by task, user or tag."""
        return await self._erasure.run(request)

    def drain(self) -> None:
        """Ends the open streams."""
        self._draining = True
        for stream in self._streams:
            stream.drain()
        self._tails.drain()
        self._compactor.give_up()

    async def _commit(self, command: Command, context: Any) -> Any:
        left_s = context.time_remaining()
        timeout_s = COMMIT_TIMEOUT_S if left_s is None else min(left_s, COMMIT_TIMEOUT_S)
        try:
            return await self._writer.ask(command, timeout_s=timeout_s)
        except DamagedRecord:
            if not isinstance(command, (SetGroupStates, SealTrajectory)):
                raise
            # No replica has it intact: it must not stop a scheduler or a session forever.
            return await self._writer.ask(replace(command, past_damage=True), timeout_s=timeout_s)


def begin_scan(
    store: PoolStore, request: pool_pb2.ScanGroupsRequest
) -> tuple[pool_pb2.ScanGroupsResponse.Begin | None, Scan]:
    """The scan for a request, and its first message."""
    if not request.HasField("since"):
        if request.tag:
            return None, store.scan_tag(request.tag)
        if request.HasField("trained_after"):
            return None, store.scan_trained(after=request.trained_after)
        return None, store.scan()
    since = store.changed_since(request.since)
    whole = since.task_ids is None
    begin = pool_pb2.ScanGroupsResponse.Begin(mark=since.mark, changes_only=not whole)
    if request.erased_only:
        return begin, store.scan_erased(since.task_ids)
    scan: Scan = store.scan(brief=True)
    if request.settled_limit and (
        bounded := store.scan_newest(
            request.settled_limit, whole=whole, counts=request.count_settled
        )
    ):
        settled, scan = bounded
        begin.settled.CopyFrom(settled)
    return begin, scan if since.task_ids is None else store.scan_changed(since.task_ids)


def _together(
    groups: Sequence[pool_pb2.ScanGroupsResponse],
) -> Sequence[pool_pb2.ScanGroupsResponse]:
    """A page in one response."""
    if groups:
        groups[0].more.extend(groups[1:])
    return groups[:1]


def _pieces(
    name: TrajectoryName, trajectory: bytes
) -> Iterator[pool_pb2.FetchTrajectoriesResponse]:
    return (
        pool_pb2.FetchTrajectoriesResponse(trajectory_id=name.trajectory_id, trajectory=chunk)
        for chunk in split(trajectory)
    )


class PoolReplicaServicer(replica_pb2_grpc.PoolReplicaServiceServicer):
    """The RPCs between the replicas of a shard, as replica.proto specifies them."""

    def __init__(self, replica: Replica, store: PoolStore, purger: Purger) -> None:
        self._replica = replica
        self._store = store
        self._purger = purger

    async def Follow(
        self, request_iterator: AsyncIterator[replica_pb2.FollowRequest], context: Any
    ) -> AsyncIterator[replica_pb2.FollowResponse]:
        """Streams commits to the follower and reads its confirmations."""
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "state":
            raise InvalidArgument("a follower must send its state first")
        link = self._replica.leader.accept(first.state)
        try:
            async for response in link.responses(requests):
                yield response
        finally:
            link.end(Unavailable("the follower disconnected"))

    async def FetchRecords(
        self, request: replica_pb2.FetchRecordsRequest, context: Any
    ) -> AsyncIterator[replica_pb2.FetchRecordsResponse]:
        """Returns intact records for the repair of another copy."""
        for chunk in split(await self._replica.records(request)):
            yield replica_pb2.FetchRecordsResponse(records=chunk)

    async def PurgeErased(
        self, request: replica_pb2.PurgeErasedRequest, context: Any
    ) -> replica_pb2.PurgeErasedResponse:
        """Rewrites the file of this copy after an erasure."""
        file = await purged(self._store, self._purger)
        return replica_pb2.PurgeErasedResponse(data_dir=file.data_dir, pending=file.pending)
