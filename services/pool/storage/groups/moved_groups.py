"""Groups that moved to another shard: their number, and whether a group is one.

Owns the counter in `meta`. A shard without moved groups pays one look-up per question.
"""

from __future__ import annotations

import struct

from forge.core.errors import FailedPrecondition
from forge.v1 import common_pb2
from services.pool.storage.groups.group_records import intact_state
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

_MOVED_KEY = b"moved_groups"
_COUNT = struct.Struct(">Q")


def moved_groups(records: Records) -> int:
    """Number of groups that moved away."""
    stored = records.get(Table.META, _MOVED_KEY)
    return 0 if stored is None else int(_COUNT.unpack(stored)[0])


def add_moved(records: Records, groups: int) -> None:
    """Changes the number."""
    records.put(Table.META, _MOVED_KEY, _COUNT.pack(max(0, moved_groups(records) + groups)))


def is_moved(records: Records, task_id: str) -> bool:
    """Whether a group moved away."""
    if not records.has(Table.META, _MOVED_KEY):
        return False
    state = intact_state(records, task_id)
    return state is not None and state.state == common_pb2.GROUP_STATE_MOVED


def check_not_moved(records: Records, task_id: str) -> None:
    """Raises FailedPrecondition for a group that moved away. Groups move without leased attempts:
    the write is late, and must not be repeated here."""
    if is_moved(records, task_id):
        state = intact_state(records, task_id)
        where = state.reason if state is not None else "another"
        raise FailedPrecondition(f"group {task_id} moved to pool shard {where}")
