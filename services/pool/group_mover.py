"""Moves of groups to and from other shards, for the scheduler's leader.

Owns the transfer: pages of records from the source, small transactions at the target.
`data.moving` owns the stored records. Nothing here chooses groups.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from forge.core.errors import Conflict, Unavailable
from forge.runtime.rpc.chunks import Joiner, split
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.streams import flowing
from forge.v1 import common_pb2, replica_pb2
from forge.v1 import pool_pb2 as pb
from services.pool import validation
from services.pool.actors.writer import WriterRef
from services.pool.data.commands import DiscardCopy, ImportGroup, MarkMoved, StageRecords
from services.pool.data.group_digest import group_digest
from services.pool.data.group_transfer import (
    content_page,
    group_page,
    has_records,
)
from services.pool.metrics import MOVED_GROUPS
from services.pool.readers import ReaderRef
from services.pool.storage.erasures import is_erased
from services.pool.storage.groups.group_records import group_record, intact_state
from services.pool.storage.groups.indexed_groups import not_moved
from services.pool.storage.groups.moved_groups import moved_groups
from services.pool.storage.journal import record_key
from services.pool.storage.records import DamagedRecord, Records
from services.pool.storage.tables import CONTENT, Key, Table
from services.pool.store import PoolStore

if TYPE_CHECKING:
    from forge.v1.pool_pb2_grpc import PoolServiceAsyncStub

PAGE_BYTES = 1 << 20
MOST_LISTED = 10_000
SILENCE_S = 30.0
_WRITE_S = 60.0
_TABLES = {
    table.value: table for table in (Table.GROUPS, Table.STATES, Table.TRAJECTORIES, *CONTENT)
}


@dataclass(eq=False, slots=True)
class GroupMover:
    """The moves of one shard, as source and as target."""

    store: PoolStore
    writer: WriterRef
    readers: ReaderRef
    pools: Remote[PoolServiceAsyncStub]

    async def list_groups(self, request: pb.ListGroupsToMoveRequest) -> pb.ListGroupsToMoveResponse:
        """Groups that did not move."""
        look = partial(_list_groups, limit=min(request.limit, MOST_LISTED))
        answer: pb.ListGroupsToMoveResponse = await self._read(look)
        return answer

    async def export(
        self, request: pb.ExportGroupsRequest
    ) -> AsyncGenerator[pb.ExportGroupsResponse, None]:
        """All records of groups, group by group."""
        for task_id in validation.check_move(request.task_ids):
            # The digest first: a change after it is found by the mark.
            digest: bytes = await self._read(partial(group_digest, task_id=task_id))
            last: Key | None = None
            while digest:
                page: list[tuple[Key, bytes]] = await self._read(
                    partial(content_page, task_id=task_id, after=last, limit_bytes=PAGE_BYTES)
                )
                if not page:
                    break
                last = page[-1][0]
                for response in _page(task_id, page):
                    yield response
            if digest:
                for response in _page(
                    task_id, await self._read(partial(group_page, task_id=task_id))
                ):
                    yield response
            erased = await self._read(partial(is_erased, task_id=task_id))
            yield pb.ExportGroupsResponse(task_id=task_id, digest=digest, last=True, erased=erased)

    async def import_groups(self, request: pb.ImportGroupsRequest) -> pb.ImportGroupsResponse:
        """Copies groups from the source. Raises StaleFence, Conflict, DataLoss, Unavailable."""
        validation.check_move(request.task_ids)
        _, stub = await self.pools.pick(
            where=lambda instance: instance.metadata.get("shard") == request.source_shard
        )
        answer = pb.ImportGroupsResponse()
        incoming = _Incoming(self, fence=request.fence)
        responses = stub.ExportGroups(pb.ExportGroupsRequest(task_ids=request.task_ids))
        source = f"pool shard {request.source_shard}"
        async for response in flowing(responses, silence_s=SILENCE_S, source=source):
            digest = await incoming.add(response)
            if digest:
                answer.groups.add(task_id=response.task_id, digest=digest)
                MOVED_GROUPS.labels("in").inc()
        return answer

    async def mark(self, request: pb.MarkGroupsMovedRequest) -> pb.MarkGroupsMovedResponse:
        """Marks groups as moved if they did not change since their export."""
        validation.check_move([group.task_id for group in request.groups])
        command = MarkMoved(
            digests={group.task_id: group.digest for group in request.groups},
            target=request.target_shard,
            fence=request.fence,
            now_unix_s=time.time(),
        )
        moved: list[str] = await self.writer.ask(command, timeout_s=_WRITE_S)
        MOVED_GROUPS.labels("out").inc(len(moved))
        return pb.MarkGroupsMovedResponse(moved=moved)

    async def write(self, command: Any) -> Any:
        """The writer's answer."""
        return await self.writer.ask(command, timeout_s=_WRITE_S)

    async def discard(self, task_id: str, *, fence: int) -> None:
        """Deletes an earlier copy of a group."""
        if not await self._read(partial(has_records, task_id=task_id)):
            return
        while await self.write(DiscardCopy(task_id=task_id, fence=fence)):
            pass

    async def _read(self, look: Any) -> Any:
        return await self.readers.run(partial(self.store.read, look))


class _Incoming:
    """The groups of one ImportGroups call, one after the other."""

    def __init__(self, mover: GroupMover, *, fence: int) -> None:
        self._mover = mover
        self._fence = fence
        self._joiner = Joiner()
        self._task_id = ""
        """The group that arrives; "" between two groups."""
        self._staged = 0
        self._rest: list[tuple[Key, bytes]] = []

    async def add(self, response: pb.ExportGroupsResponse) -> bytes:
        """Stores one response; the digest of a group that is complete, else b""."""
        if response.last:
            return await self._end(response)
        if not self._task_id:
            self._task_id, self._staged, self._rest = response.task_id, 0, []
            await self._mover.discard(response.task_id, fence=self._fence)
        whole = self._joiner.add(response.records)
        if whole is None:
            return b""
        values = _values(whole)
        content = tuple(each for each in values if each[0][0] in CONTENT)
        self._rest += (each for each in values if each[0][0] not in CONTENT)
        if content:
            self._staged += len(content)
            await self._mover.write(StageRecords(values=content, fence=self._fence))
        return b""

    async def _end(self, response: pb.ExportGroupsResponse) -> bytes:
        task_id, self._task_id = self._task_id, ""
        if not response.digest:
            return b""
        if task_id != response.task_id or self._joiner.pending_bytes:
            raise Conflict(f"group {response.task_id} arrived in parts: import it again")
        command = ImportGroup(
            task_id=task_id,
            values=tuple(self._rest),
            staged=self._staged,
            erased=response.erased,
            fence=self._fence,
        )
        await self._mover.write(command)
        return response.digest


def _list_groups(records: Records, *, limit: int) -> pb.ListGroupsToMoveResponse:
    answer = pb.ListGroupsToMoveResponse(
        groups_left=records.count(Table.GROUPS) - moved_groups(records)
    )
    for task_id in not_moved(records, limit):
        state = intact_state(records, task_id) or common_pb2.GroupRecord()
        try:
            group = group_record(records, task_id) or common_pb2.GroupRecord()
        except DamagedRecord:
            group = common_pb2.GroupRecord()
        answer.groups.add(task_id=task_id, purpose=group.task.purpose, state=state.state)
    return answer


def _page(task_id: str, page: list[tuple[Key, bytes]]) -> list[pb.ExportGroupsResponse]:
    changes = replica_pb2.RecordChanges()
    for (table, key), value in page:
        changes.changes.add(record=record_key(table, key), value=value)
    return [
        pb.ExportGroupsResponse(task_id=task_id, records=chunk)
        for chunk in split(changes.SerializeToString())
    ]


def _values(message: bytes) -> list[tuple[Key, bytes]]:
    changes = replica_pb2.RecordChanges.FromString(message)
    unknown = [each.record.table for each in changes.changes if each.record.table not in _TABLES]
    if unknown:
        raise Unavailable(f"the source sends table {unknown[0]!r}: upgrade this shard first")
    return [((_TABLES[each.record.table], each.record.key), each.value) for each in changes.changes]
