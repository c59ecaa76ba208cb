"""Indexes of the groups of a shard, and counters of settled ones.

    pending         place in the queue     groups that are not settled
    settled order   step, or time          settled groups: trained, then tombstoned and evaluated,
                                           then groups that moved to another shard
    tags            tag, place             groups with a tag
    settled counts  see `SettledCounts`    counters of settled groups, for schedulers

A scan reads pending groups and a bounded number of settled ones through them. Owns their keys, and
keeps them equal to the records of groups, states and trajectories; `rebuild` makes them from
these. A settled group stays counted until a rewind.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from forge.core.errors import DataLoss
from forge.core.trajectory import TaskId
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.pool.storage.group_records import group_record, group_state, intact_state
from services.pool.storage.keys import (
    group_key,
    name_of_trajectory_key,
    place_of_queue_key,
    queue_key,
    task_of_queue_key,
    task_prefix,
)
from services.pool.storage.records import Records, decode_header, is_intact_entry, open_value
from services.pool.storage.settled_counts import Rollout, SettledCounts
from services.pool.storage.tables import Key, Table

SETTLED_STATES = frozenset(
    {
        common_pb2.GROUP_STATE_TRAINED,
        common_pb2.GROUP_STATE_TOMBSTONED,
        common_pb2.GROUP_STATE_EVALUATED,
    }
)
INDEXED_STATES = SETTLED_STATES | {common_pb2.GROUP_STATE_MOVED}
"""States of groups in the settled order; scans omit moved ones."""
_ORDER = struct.Struct(">BQ")
_TRAINED, _OTHER, _MOVED = 1, 2, 3
_MS = 1000
_TAG_BYTES = 16
INDEXES = (Table.PENDING, Table.SETTLED_ORDER, Table.TAGS)


def tag_prefix(tag: str) -> bytes:
    """Start of the keys of a tag's groups; a place in the queue follows."""
    return blake2b(tag.encode(), digest_size=_TAG_BYTES).digest()


def entries_of(group: common_pb2.GroupRecord, state: common_pb2.GroupRecord) -> list[Key]:
    """Every index entry of a group; `group` is without its state."""
    task = group.task
    place = queue_key(task.purpose, group.queue_index, task.task_id)
    listed = task.tag and state.state != common_pb2.GROUP_STATE_MOVED
    entries = [(Table.TAGS, tag_prefix(task.tag) + place)] if listed else []
    if state.state in INDEXED_STATES:
        entries.append((Table.SETTLED_ORDER, _order_key(task.task_id, state)))
    else:
        entries.append((Table.PENDING, place))
    return entries


def task_of_entry(table: Table, key: bytes) -> TaskId:
    """The task of an entry. Raises ValueError."""
    match table:
        case Table.PENDING:
            return task_of_queue_key(key)
        case Table.TAGS:
            return task_of_queue_key(key[_TAG_BYTES:])
        case _:
            return TaskId(key[_ORDER.size :].decode())


def _order_key(task_id: str, state: common_pb2.GroupRecord) -> bytes:
    if state.state == common_pb2.GROUP_STATE_TRAINED:
        return _ORDER.pack(_TRAINED, state.step) + group_key(task_id)
    kind = _MOVED if state.state == common_pb2.GROUP_STATE_MOVED else _OTHER
    return _ORDER.pack(kind, round(state.settled_unix_s * _MS)) + group_key(task_id)


def enter_new(records: Records, group: common_pb2.GroupRecord) -> None:
    """Indexes a new, pending group."""
    for table, key in entries_of(group, common_pb2.GroupRecord()):
        records.put(table, key, b"")


def enter_copied(
    records: Records, group: common_pb2.GroupRecord, state: common_pb2.GroupRecord
) -> None:
    """Indexes and counts a group from another shard, after its trajectories."""
    for table, key in entries_of(group, state):
        records.put(table, key, b"")
    if state.state in SETTLED_STATES:
        counts = SettledCounts()
        counts.enter(group, state, counted_rollouts(records, group))
        _store(records, counts)


def leave_copied(records: Records, task_id: str, state: common_pb2.GroupRecord | None) -> None:
    """Undoes `enter_copied`, while the records of the group are still there. `state` is None if it
    is damaged."""
    try:
        group = group_record(records, task_id)
    except DataLoss:
        group = None
    if group is None or state is None:
        _remove_entries(records, {task_id})
        _recount(records, without=task_id)
        return
    for table, key in entries_of(group, state):
        records.delete(table, key)
    if state.state in SETTLED_STATES:
        counts = SettledCounts()
        counts.leave(group, state, counted_rollouts(records, group))
        _store(records, counts)


class GroupMoves:
    """State changes of groups in one command; call `store` last."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._counts = SettledCounts()
        self._damaged: set[str] = set()
        """Tasks of groups with a damaged record or former state."""

    def moved(
        self, task_id: str, before: common_pb2.GroupRecord | None, after: common_pb2.GroupRecord
    ) -> None:
        """A group's state changed; `before` is None if that was damaged."""
        if before is None:
            self._damaged.add(task_id)
            return
        was, now = before.state in SETTLED_STATES, after.state in SETTLED_STATES
        if not (before.state in INDEXED_STATES or after.state in INDEXED_STATES):
            return
        try:
            group = group_record(self._records, task_id)
        except DataLoss:
            self._damaged.add(task_id)
            return
        if group is None:
            return
        old, new = entries_of(group, before), entries_of(group, after)
        if old != new:
            for table, key in old:
                self._records.delete(table, key)
            for table, key in new:
                self._records.put(table, key, b"")
        rollouts = counted_rollouts(self._records, group)
        if was:
            self._counts.leave(group, before, rollouts)
        if now:
            self._counts.enter(group, after, rollouts)

    def store(self) -> None:
        """Stores the indexes; the states are stored already."""
        if self._damaged:
            _index_again(self._records, self._damaged)
        else:
            _store(self._records, self._counts)


@dataclass(frozen=True, slots=True)
class SettledGroupRollouts:
    """The rollouts of a settled group before one of its trajectories changes."""

    group: common_pb2.GroupRecord
    state: common_pb2.GroupRecord
    rollouts: list[Rollout]


def before_late_seal(
    records: Records, task_id: str, *, past_damage: bool
) -> SettledGroupRollouts | None:
    """None for a group that is not settled: its rollouts are counted when it is. Raises
    `DamagedRecord`, or returns None, for a group that cannot be read."""
    try:
        state = group_state(records, task_id)
        settled = state is not None and state.state in SETTLED_STATES
        group = group_record(records, task_id) if settled else None
    except DataLoss:
        if not past_damage:
            raise
        return None
    if state is None or group is None:
        return None
    return SettledGroupRollouts(group, state, counted_rollouts(records, group))


def after_late_seal(records: Records, before: SettledGroupRollouts | None) -> None:
    """A trajectory of the group was sealed."""
    if before is None:
        return
    counts = SettledCounts()
    counts.leave(before.group, before.state, before.rollouts)
    counts.enter(before.group, before.state, counted_rollouts(records, before.group))
    _store(records, counts)


def _store(records: Records, counts: SettledCounts) -> None:
    try:
        counts.store(records)
    except DataLoss as error:
        # Counters can be made again, so a damaged one refuses no commit.
        log.error("settled_counts_damaged", error=str(error))
        _recount(records)


def counted_rollouts(records: Records, group: common_pb2.GroupRecord) -> list[Rollout]:
    """For each rollout of a training group its first seal: the lowest attempt."""
    if group.task.purpose != common_pb2.PURPOSE_TRAIN:
        return []
    found: dict[int, Rollout] = {}
    for key, value in records.scan_sealed(
        Table.TRAJECTORIES, prefix=task_prefix(group.task.task_id)
    ):
        index = name_of_trajectory_key(key).rollout_index
        if index >= group.task.group_size or index in found:
            continue
        try:
            header = decode_header(open_value(Table.TRAJECTORIES, key, value))
        except DataLoss:
            continue  # A scan passes it over, too.
        if header.state == common_pb2.TRAJECTORY_STATE_SEALED:
            found[index] = Rollout(sealed_unix_s=header.sealed_unix_s, trajectory=key)
    return list(found.values())


def rebuild(records: Records) -> None:
    """Makes all indexes again. A damaged group is indexed by its readable records."""
    for table in INDEXES:
        records.clear(table)
    for group, state in stored_groups(records):
        for table, key in entries_of(group, state):
            records.put(table, key, b"")
    _recount(records)


def _index_again(records: Records, task_ids: Container[str]) -> None:
    """Makes the entries of some groups, and all counters, again."""
    _remove_entries(records, task_ids)
    for group, state in stored_groups(records):
        if group.task.task_id in task_ids:
            for table, key in entries_of(group, state):
                records.put(table, key, b"")
    _recount(records)


def _remove_entries(records: Records, task_ids: Container[str]) -> None:
    for table in (Table.PENDING, Table.SETTLED_ORDER):
        keys = [key for key, _ in records.scan_sealed(table)]
        for key in keys:
            with suppress(ValueError):
                if task_of_entry(table, key) in task_ids:
                    records.delete(table, key)


def _recount(records: Records, *, without: str = "") -> None:
    # One by one, not by `clear`: replicas get what a commit changed.
    records.delete_prefix(Table.SETTLED_COUNTS, b"", limit=sys.maxsize, limit_bytes=sys.maxsize)
    counts = SettledCounts()
    for group, state in stored_groups(records):
        if state.state in SETTLED_STATES and group.task.task_id != without:
            counts.enter(group, state, counted_rollouts(records, group))
    counts.store(records)


def stored_groups(
    records: Records,
) -> Iterator[tuple[common_pb2.GroupRecord, common_pb2.GroupRecord]]:
    """Every group and its state. A damaged state counts as pending; the queue gives id, purpose and
    place of a damaged group."""
    damaged: set[TaskId] = set()
    for key, value in records.scan_sealed(Table.GROUPS):
        try:
            payload = bytes(open_value(Table.GROUPS, key, value))
        except DataLoss:
            damaged.add(TaskId(key.decode()))
            continue
        yield common_pb2.GroupRecord.FromString(payload), _state_of(records, key.decode())
    if not damaged:
        return
    for key, value in records.scan_sealed(Table.QUEUE):
        if not is_intact_entry(key, value) or task_of_queue_key(key) not in damaged:
            continue
        purpose, queue_index = place_of_queue_key(key)
        task = common_pb2.Task(task_id=task_of_queue_key(key), purpose=purpose, group_size=1)
        group = common_pb2.GroupRecord(task=task, queue_index=queue_index)
        yield group, _state_of(records, task.task_id)


def _state_of(records: Records, task_id: str) -> common_pb2.GroupRecord:
    return intact_state(records, task_id) or common_pb2.GroupRecord()


# What a scan reads


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestSettled:
    """The settled groups of a bounded scan, and where it stops."""

    task_ids: list[TaskId]
    """The longest settled first: those that were trained, then the others."""
    left_out_step: int
    """Last step that trained a group that is left out; 0 when none is."""
    left_out_unix_s: float
    """When the newest of the others that are left out was settled; 0 when none is."""


def is_whole(records: Records) -> bool:
    """Whether the indexes have as many groups as are stored."""
    indexed = records.count(Table.PENDING) + records.count(Table.SETTLED_ORDER)
    return indexed == records.count(Table.GROUPS)


def newest_settled(records: Records, limit: int) -> NewestSettled:
    """At least `limit` groups that were trained, to the end of a step, and `limit` others."""
    trained: list[TaskId] = []
    step = 0
    for order, task_id in _backwards(records, _TRAINED):
        if len(trained) >= limit and order != step:
            step = order
            break
        trained.append(task_id)
        step = order
    else:
        step = 0
    others: list[TaskId] = []
    left_out_ms = 0
    for order, task_id in _backwards(records, _OTHER):
        if len(others) >= limit:
            left_out_ms = order
            break
        others.append(task_id)
    return NewestSettled(
        task_ids=trained[::-1] + others[::-1],
        left_out_step=step,
        left_out_unix_s=left_out_ms / _MS,
    )


def trained_after(records: Records, step: int) -> list[TaskId]:
    """Groups that are trained, by a later step, in the order of steps."""
    after = _ORDER.pack(_TRAINED, min(step + 1, 2**64 - 1))
    found = []
    for key, _ in records.scan_sealed(Table.SETTLED_ORDER, after=after):
        if key[0] != _TRAINED:
            break
        found.append(task_of_entry(Table.SETTLED_ORDER, key))
    return found


def unindexed(records: Records) -> list[TaskId]:
    """Groups that are not settled and have no intact entry among the pending."""
    pending = {
        task_of_queue_key(key)
        for key, value in records.scan_sealed(Table.PENDING)
        if is_intact_entry(key, value)
    }
    tasks = (TaskId(key.decode()) for key, _ in records.scan_sealed(Table.GROUPS))
    missing = (task_id for task_id in tasks if task_id not in pending)
    return [each for each in missing if _state_of(records, each).state not in INDEXED_STATES]


def not_moved(records: Records, limit: int) -> list[TaskId]:
    """Settled groups, then pending ones, that did not move to another shard."""
    found: list[TaskId] = []
    for table in (Table.SETTLED_ORDER, Table.PENDING):
        for key, value in records.scan_sealed(table):
            if len(found) == limit:
                return found
            if table is Table.SETTLED_ORDER and key[0] == _MOVED:
                break
            if is_intact_entry(key, value):
                found.append(task_of_entry(table, key))
    return found


def next_queue_index(records: Records, purpose: int) -> int:
    """One above the highest queue index of a purpose."""
    last = next(records.keys_backwards(Table.QUEUE, prefix=bytes([purpose])), None)
    return 0 if last is None else place_of_queue_key(last)[1] + 1


def _backwards(records: Records, kind: int) -> Iterator[tuple[int, TaskId]]:
    """Settled groups of a kind, the last first, each with its step or time."""
    for key in records.keys_backwards(Table.SETTLED_ORDER, prefix=bytes([kind])):
        yield _ORDER.unpack_from(key)[1], task_of_entry(Table.SETTLED_ORDER, key)
