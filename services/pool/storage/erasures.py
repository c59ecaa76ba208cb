"""Tombstones of erased tasks, and whether a file may have their bytes in free pages.

`meta` has a tombstone per erased task, the entries of the ledger that are applied, and the id of
the newest erasure: replicas share them. The local table `replica` has the id of the erasure after
which this file was rewritten.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from itertools import islice

from forge.core.trajectory import TaskId
from forge.v1 import common_pb2
from services.pool.storage.keys import group_key
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

_TOMBSTONE = b"erased:"
_NEWEST = b"erasure"
_NOTED = b"ledger:"
_PURGED = b"purged"


def is_erased(records: Records, task_id: str) -> bool:
    """True if a task has a tombstone, intact or not."""
    return records.has(Table.META, _TOMBSTONE + group_key(task_id))


def erased_tasks(records: Records, *, after: str, limit: int) -> list[TaskId]:
    """The first erased tasks with a greater id, in order."""
    keys = records.keys(Table.META, prefix=_TOMBSTONE, after=_TOMBSTONE + group_key(after))
    return [TaskId(key[len(_TOMBSTONE) :].decode()) for key in islice(keys, limit)]


def put_erasure(records: Records, task_id: str) -> None:
    """Stores the tombstone of a task. Each call is an erasure of its own: a file may be rewritten
    between two transactions."""
    if not is_erased(records, task_id):
        records.put(Table.META, _TOMBSTONE + group_key(task_id), b"")
    records.put(Table.META, _NEWEST, uuid.uuid4().hex.encode())


def noted_erasures(records: Records) -> dict[str, bytes]:
    """Ledger entries that this store has applied, by id."""
    return {
        key[len(_NOTED) :].decode(): bytes(value)
        for key, value in records.scan(Table.META, prefix=_NOTED)
    }


def note_erasures(records: Records, entries: Mapping[str, bytes]) -> None:
    """Stores that ledger entries are applied."""
    for erasure_id, entry in entries.items():
        if not records.has(Table.META, _NOTED + erasure_id.encode()):
            records.put(Table.META, _NOTED + erasure_id.encode(), entry)


def unpurged_erasure(records: Records) -> str:
    """Id of the newest erasure if this file may have its bytes in free pages; else ""."""
    newest = records.meta_text(_NEWEST)
    purged = bytes(records.get(Table.REPLICA, _PURGED) or b"").decode()
    return "" if newest == purged else newest


def put_purged(records: Records, erasure: str) -> None:
    """The file was rewritten after an erasure."""
    records.put(Table.REPLICA, _PURGED, erasure.encode())


def erased_group(group: common_pb2.GroupRecord) -> common_pb2.GroupRecord:
    """`group` without payload, tag, user and metadata."""
    cleared = common_pb2.GroupRecord()
    cleared.CopyFrom(group)
    for field in ("payload_json", "tag", "user", "metadata"):
        cleared.task.ClearField(field)
    return cleared
