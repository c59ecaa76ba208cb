"""Indexes of the groups of a shard, and counters of settled ones.

    pending         place in the queue     groups that are not settled
    settled order   step, or time          settled groups: trained, then tombstoned and evaluated,
                                           then groups that moved to another shard
    tags            tag, place             groups with a tag
    labels          label, task            groups with a label, see `labels`
    settled counts  see `SettledCounts`    counters of settled groups, for schedulers

Owns their keys, and keeps them equal to the records of groups, states and trajectories; `rebuild`
makes them from these. A settled group stays counted until a rewind. Not here: what scans read
through them (`indexed_groups`).
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from forge.core.errors import DataLoss
from forge.core.trajectory import TaskId
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.pool.storage.groups.group_records import group_record, group_state, intact_state
from services.pool.storage.groups.labels import label_keys, task_of_label_key
from services.pool.storage.groups.settled_counts import CountedRollout, SettledCounts
from services.pool.storage.keys import (
    group_key,
    name_of_trajectory_key,
    place_of_queue_key,
    queue_key,
    task_of_queue_key,
    task_prefix,
)
from services.pool.storage.records import Records, decode_header, is_intact_entry, open_value
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
ORDER = struct.Struct(">BQ")
"""Start of a key of the settled order: a kind, and the step or the time in units of 1/`MS` s."""
TRAINED, OTHER, MOVED = 1, 2, 3
MS = 1000
_TAG_BYTES = 16
INDEXES = (Table.PENDING, Table.SETTLED_ORDER, Table.TAGS, Table.LABELS)


def tag_prefix(tag: str) -> bytes:
    """Start of the keys of a tag's groups; a place in the queue follows."""
    return blake2b(tag.encode(), digest_size=_TAG_BYTES).digest()


def entries_of(group: common_pb2.GroupRecord, state: common_pb2.GroupRecord) -> list[Key]:
    """Every index entry of a group; `group` is without its state."""
    task = group.task
    place = queue_key(task.purpose, group.queue_index, task.task_id)
    entries = []
    if state.state != common_pb2.GROUP_STATE_MOVED:
        entries = [(Table.LABELS, key) for key in label_keys(task)]
        if task.tag:
            entries.append((Table.TAGS, tag_prefix(task.tag) + place))
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
        case Table.LABELS:
            return task_of_label_key(key)
        case _:
            return TaskId(key[ORDER.size :].decode())


def _order_key(task_id: str, state: common_pb2.GroupRecord) -> bytes:
    if state.state == common_pb2.GROUP_STATE_TRAINED:
        return ORDER.pack(TRAINED, state.step) + group_key(task_id)
    kind = MOVED if state.state == common_pb2.GROUP_STATE_MOVED else OTHER
    return ORDER.pack(kind, round(state.settled_unix_s * MS)) + group_key(task_id)


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


class StateMoves:
    """State changes of groups in one command; call `store` last."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._counts = SettledCounts()
        self._damaged: set[str] = set()
        """Tasks of groups with a damaged record or former state."""

    def moved(
        self, task_id: str, before: common_pb2.GroupRecord | None, after: common_pb2.GroupRecord
    ) -> None:
        """Note that a group's state changed; `before` is None if that was damaged."""
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
        for table, key in old:
            if (table, key) not in new:
                self._records.delete(table, key)
        for table, key in new:
            if (table, key) not in old:
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
    rollouts: list[CountedRollout]


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


def counted_rollouts(records: Records, group: common_pb2.GroupRecord) -> list[CountedRollout]:
    """For each rollout of a training group its first seal: the lowest attempt."""
    if group.task.purpose != common_pb2.PURPOSE_TRAIN:
        return []
    found: dict[int, CountedRollout] = {}
    for key, value in records.scan_checksummed(
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
            found[index] = CountedRollout(sealed_unix_s=header.sealed_unix_s, trajectory=key)
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
    for table in INDEXES:
        keys = [key for key, _ in records.scan_checksummed(table)]
        for key in keys:
            with suppress(ValueError):
                if task_of_entry(table, key) in task_ids:
                    records.delete(table, key)


def _recount(records: Records, *, without: str = "") -> None:
    # One by one, not by `clear`: replicas get what a commit changed.
    for key in list(records.keys(Table.SETTLED_COUNTS, prefix=b"")):
        records.delete(Table.SETTLED_COUNTS, key)
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
    for key, value in records.scan_checksummed(Table.GROUPS):
        try:
            payload = bytes(open_value(Table.GROUPS, key, value))
        except DataLoss:
            damaged.add(TaskId(key.decode()))
            continue
        yield common_pb2.GroupRecord.FromString(payload), state_of(records, key.decode())
    if not damaged:
        return
    for key, value in records.scan_checksummed(Table.QUEUE):
        if not is_intact_entry(key, value) or task_of_queue_key(key) not in damaged:
            continue
        purpose, queue_index = place_of_queue_key(key)
        task = common_pb2.Task(task_id=task_of_queue_key(key), purpose=purpose, group_size=1)
        group = common_pb2.GroupRecord(task=task, queue_index=queue_index)
        yield group, state_of(records, task.task_id)


def state_of(records: Records, task_id: str) -> common_pb2.GroupRecord:
    """The state of a group; pending if it is absent or damaged."""
    return intact_state(records, task_id) or common_pb2.GroupRecord()
