"""Mends the indexes of tags and labels from the records of groups.

Owns the search for missing, damaged and stray entries, and their repair. An entry that lost a bit
of its key is in no copy under that key, so the record of the group decides, not another replica. A
damaged group keeps the entries it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from forge.core.errors import DataLoss
from forge.v1 import common_pb2
from services.pool.data.commands import MendIndex
from services.pool.storage.groups.group_index import entries_of, task_of_entry
from services.pool.storage.groups.group_records import group_record, group_state
from services.pool.storage.keys import group_key
from services.pool.storage.records import Records, is_intact_entry
from services.pool.storage.tables import Key, Table

MENDED = (Table.TAGS, Table.LABELS)


def wrong_entries(
    records: Records, table: Table, *, after: bytes, limit: int
) -> tuple[list[Key], bytes]:
    """Returns the wrong entries among the next `limit` records, and the last key read; b"" at the
    end. GROUPS finds missing entries."""
    keys = [key for key, _ in islice(records.scan_checksummed(table, after=after), limit)]
    wrong: list[Key] = []
    for key in keys:
        entries = _of_group(records, key) if table is Table.GROUPS else [(table, key)]
        wrong += [entry for entry in entries if _is_wrong(records, entry)]
    return wrong, keys[-1] if len(keys) == limit else b""


def mend(records: Records, command: MendIndex) -> int:
    """Stores and deletes entries that are still wrong; returns the number of changes."""
    changed = 0
    for table, key in command.entries:
        if not _is_wrong(records, (table, key)):
            continue
        if _is_wanted(records, (table, key)):
            records.put(table, key, b"")
        else:
            records.delete(table, key)
        changed += 1
    return changed


def _of_group(records: Records, key: bytes) -> Iterator[Key]:
    with suppress(DataLoss, UnicodeDecodeError):
        task_id = key.decode()
        group, state = group_record(records, task_id), group_state(records, task_id)
        if group is not None and group_key(group.task.task_id) == key:
            for table, entry in entries_of(group, state or common_pb2.GroupRecord()):
                if table in MENDED:
                    yield table, entry


def _is_wrong(records: Records, entry: Key) -> bool:
    """Whether an entry is missing or damaged, or has no group that wants it. Of a damaged group no
    entry is wrong."""
    table, key = entry
    value = records.get_checksummed(table, key)
    try:
        if not _is_wanted(records, entry):
            return value is not None
    except DataLoss:
        return False
    return value is None or not is_intact_entry(key, value)


def _is_wanted(records: Records, entry: Key) -> bool:
    """Whether the group of an entry has it. Raises `DataLoss` for a damaged group."""
    try:
        task_id = task_of_entry(*entry)
        key = group_key(task_id)
    except (ValueError, IndexError):
        return False
    if not records.has(Table.GROUPS, key):
        return False
    group, state = group_record(records, task_id), group_state(records, task_id)
    return group is not None and entry in entries_of(group, state or common_pb2.GroupRecord())
