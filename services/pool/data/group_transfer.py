"""Moves of whole groups between shards, while the source retires.

    source   export      pages of records as they are on disk, and a digest of the group
             mark        MOVED, if the digest is still the same: the copy is then authoritative
    target   discard     an earlier copy
             stage       turns and rewards
             import      headers, group, state, queue entry, indexes, counters: one transaction

Each change of the target and each mark carries the fence of the scheduler's leader. Until the mark
the source is authoritative, and a copy is replaced by the next import. A moved group stays on the
source as it was, without index entries. The change log of the target gets new entries, in the order
of the import.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from forge.core.errors import Conflict
from forge.v1 import common_pb2
from services.pool.data.commands import DiscardCopy, ImportGroup, MarkMoved, StageRecords
from services.pool.data.group_digest import group_digest
from services.pool.data.removal.freed_groups import forget_orphan, put_state
from services.pool.data.writes.store_groups import check_fence, raise_fence
from services.pool.storage.change_log import delete_changes, log_closed, log_rewarded
from services.pool.storage.erasures import put_erasure
from services.pool.storage.groups.group_index import (
    SETTLED_STATES,
    StateMoves,
    enter_copied,
    leave_copied,
)
from services.pool.storage.groups.group_records import group_record, intact_state
from services.pool.storage.groups.moved_groups import add_moved
from services.pool.storage.groups.settled_index import index_settled, remove_settled
from services.pool.storage.keys import SHARD_KEY, group_key, queue_key, task_prefix
from services.pool.storage.records import (
    Deletions,
    Records,
    encode_header,
    intact_header,
    open_value,
)
from services.pool.storage.tables import CONTENT, Key, Table

DISCARDED_RECORDS = 128
"""Most turns and rewards of a copy that one transaction deletes."""


# At the source


def content_page(
    records: Records, task_id: str, *, after: Key | None, limit_bytes: int
) -> list[tuple[Key, bytes]]:
    """The next turns and rewards of a group, as they are on disk; none at the end."""
    page: list[tuple[Key, bytes]] = []
    size_bytes = 0
    for table, key, value in _content_after(records, task_id, after):
        page.append(((table, key), value))
        size_bytes += len(value)
        if size_bytes >= limit_bytes:
            break
    return page


def _content_after(
    records: Records, task_id: str, after: Key | None
) -> Iterator[tuple[Table, bytes, bytes]]:
    first = 0 if after is None else CONTENT.index(after[0])
    for table in CONTENT[first:]:
        start = after[1] if after is not None and table is after[0] else b""
        for key, value in records.scan_checksummed(table, prefix=task_prefix(task_id), after=start):
            yield table, key, value


def group_page(records: Records, task_id: str) -> list[tuple[Key, bytes]]:
    """Record, state and trajectory headers of a group, as they are on disk."""
    page = [
        ((table, group_key(task_id)), value)
        for table in (Table.GROUPS, Table.STATES)
        if (value := records.get_checksummed(table, group_key(task_id))) is not None
    ]
    headers = records.scan_checksummed(Table.TRAJECTORIES, prefix=task_prefix(task_id))
    return page + [((Table.TRAJECTORIES, key), value) for key, value in headers]


def mark_moved(records: Records, command: MarkMoved) -> list[str]:
    """Marks groups as MOVED; the tasks that are moved to the target, now or before. Raises
    StaleFence."""
    check_fence(records, command.fence)
    moved = []
    moves = StateMoves(records)
    for task_id, digest in command.digests.items():
        state = intact_state(records, task_id)
        if state is not None and state.state == common_pb2.GROUP_STATE_MOVED:
            moved += [task_id] if state.reason == command.target else []
        elif digest and group_digest(records, task_id) == digest:
            gone = common_pb2.GroupRecord(state=common_pb2.GROUP_STATE_MOVED, reason=command.target)
            put_state(records, task_id, gone, moves, now_unix_s=command.now_unix_s)
            moved.append(task_id)
            add_moved(records, 1)
    moves.store()
    raise_fence(records, command.fence)
    return moved


# At the target


def discard_copy(records: Records, command: DiscardCopy) -> bool:
    """Deletes an earlier copy of a group, up to the limits; whether anything is left. Raises
    StaleFence."""
    check_fence(records, command.fence)
    task_id = command.task_id
    key, prefix = group_key(task_id), task_prefix(task_id)
    state = intact_state(records, task_id)
    if records.has(Table.GROUPS, key):
        if state is not None and state.state == common_pb2.GROUP_STATE_MOVED:
            add_moved(records, -1)
        leave_copied(records, task_id, state)
        group = group_record(records, task_id)
        if group is not None:
            records.delete(Table.QUEUE, queue_key(group.task.purpose, group.queue_index, task_id))
    if records.has(Table.STATES, key):
        remove_settled(records, task_id, state)
    for table in (Table.GROUPS, Table.STATES):
        records.delete(table, key)
    for found, value in list(records.scan_checksummed(Table.TRAJECTORIES, prefix=prefix)):
        header = intact_header(found, value)
        if header is not None:
            delete_changes(records, header)
        records.delete(Table.TRAJECTORIES, found)
    records.delete_content(prefix, Deletions(limit=DISCARDED_RECORDS))
    raise_fence(records, command.fence)
    return has_records(records, task_id)


def has_records(records: Records, task_id: str) -> bool:
    """True if anything of a task is stored here."""
    key = group_key(task_id)
    return any(
        records.has(table, key) for table in (Table.GROUPS, Table.STATES)
    ) or records.has_any((Table.TRAJECTORIES, *CONTENT), task_prefix(task_id))


def stage_records(records: Records, command: StageRecords) -> None:
    """Stores turns and rewards of a group that follows. Raises StaleFence."""
    check_fence(records, command.fence)
    for (table, key), value in command.values:
        records.put_checksummed(table, key, value, replicated=True)
    raise_fence(records, command.fence)


def import_group(records: Records, command: ImportGroup) -> None:
    """Stores a group whose turns and rewards are staged. Raises StaleFence, Conflict if they are
    not, DataLoss if the record of the group is damaged."""
    check_fence(records, command.fence)
    task_id = command.task_id
    key, prefix = group_key(task_id), task_prefix(task_id)
    staged = sum(1 for table in CONTENT for _ in records.keys(table, prefix=prefix))
    if staged != command.staged:
        raise Conflict(f"group {task_id} has {staged} staged records, not {command.staged}")
    values = dict(command.values)
    group = _on_this_shard(records, task_id, values.pop((Table.GROUPS, key), b""))
    if command.erased:
        put_erasure(records, task_id)
    forget_orphan(records, task_id)
    records.put(Table.GROUPS, key, group.SerializeToString())
    for (table, found), value in values.items():
        if table is Table.TRAJECTORIES:
            _put_header(records, found, value)
        else:
            records.put_checksummed(table, found, value, replicated=True)
    place = queue_key(group.task.purpose, group.queue_index, task_id)
    records.put(Table.QUEUE, place, b"")
    state = intact_state(records, task_id) or common_pb2.GroupRecord()
    enter_copied(records, group, state)
    if state.state in SETTLED_STATES and (not state.freed_unix_s or staged):
        index_settled(records, task_id, state)
    raise_fence(records, command.fence)


def _on_this_shard(records: Records, task_id: str, value: bytes) -> common_pb2.GroupRecord:
    payload = open_value(Table.GROUPS, group_key(task_id), value)
    group = common_pb2.GroupRecord.FromString(bytes(payload))
    group.pool_shard = records.meta_text(SHARD_KEY)
    return group


def _put_header(records: Records, key: bytes, value: bytes) -> None:
    header = intact_header(key, value)
    if header is None:
        # The damage stays visible.
        records.put_checksummed(Table.TRAJECTORIES, key, value, replicated=True)
        return
    rewarded = bool(header.rewarded_change)
    header = msgspec.structs.replace(header, closed_change=0, rewarded_change=0)
    if not header.is_open and not header.freed:
        header = log_closed(records, key, header)
        if rewarded:
            header = log_rewarded(records, key, header)
    records.put(Table.TRAJECTORIES, key, encode_header(header))
