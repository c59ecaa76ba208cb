"""Reads the records of one group: its constant part, and its state."""

from __future__ import annotations

from forge.v1 import common_pb2
from services.pool.storage.keys import group_key
from services.pool.storage.records import DamagedRecord, Records
from services.pool.storage.tables import Table


def group_record(records: Records, task_id: str) -> common_pb2.GroupRecord | None:
    """The group without its state; None if it is not stored. Raises `DamagedRecord`."""
    return _record(records, Table.GROUPS, task_id)


def group_state(records: Records, task_id: str) -> common_pb2.GroupRecord | None:
    """State, batch, step, reason and times of a group. Otherwise as `group_record`."""
    return _record(records, Table.STATES, task_id)


def intact_state(records: Records, task_id: str) -> common_pb2.GroupRecord | None:
    """None for a state that is damaged or lost."""
    try:
        return group_state(records, task_id)
    except DamagedRecord:
        return None


def _record(records: Records, table: Table, task_id: str) -> common_pb2.GroupRecord | None:
    stored = records.get(table, group_key(task_id))
    return None if stored is None else common_pb2.GroupRecord.FromString(bytes(stored))
