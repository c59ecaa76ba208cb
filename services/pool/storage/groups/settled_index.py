"""The index of settled groups: which groups can be freed, in the order of settlement.

Owns the keys and values of table `settled`. Orphans are in it too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from forge.core.errors import DataLoss
from forge.core.trajectory import TaskId
from forge.v1 import common_pb2
from services.pool.storage.groups.group_index import SETTLED_STATES
from services.pool.storage.keys import group_key
from services.pool.storage.records import Records, open_value
from services.pool.storage.tables import Table

_SETTLED_KEY = struct.Struct(">Q")
_STEP = struct.Struct(">Q")
_MS = 1000
_ORPHAN = 2**64 - 1
"""In place of a step: the group was never stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledGroup:
    """One entry of the index."""

    key: bytes
    task_id: TaskId
    settled_unix_s: float
    step: int
    """Step that trained it; 0 if it was tombstoned or evaluated."""
    orphan: bool = False
    """Trajectories without a group: only age frees them."""
    damaged: bool = False
    """The entry is damaged: its group is unknown and not freed."""


def index_settled(records: Records, task_id: str, state: common_pb2.GroupRecord) -> None:
    """Adds a settled group."""
    key = settled_key(state.settled_unix_s, task_id)
    records.put(Table.SETTLED, key, _STEP.pack(state.step))


def remove_settled(records: Records, task_id: str, state: common_pb2.GroupRecord | None) -> None:
    """Removes a group; `state` as it was added, None if unknown."""
    if state is None:
        keys = [key for key, _ in records.scan_checksummed(Table.SETTLED)]
        entered = [key for key in keys if key[_SETTLED_KEY.size :] == group_key(task_id)]
    else:
        entered = [settled_key(state.settled_unix_s, task_id)] if state.settled_unix_s else []
    for key in entered:
        records.delete(Table.SETTLED, key)


def index_orphan(records: Records, task_id: str, state: common_pb2.GroupRecord) -> None:
    """Adds an orphan under the state it was given."""
    key = settled_key(state.settled_unix_s, task_id)
    records.put(Table.SETTLED, key, _STEP.pack(_ORPHAN))


def index_all_settled(records: Records, *, now_unix_s: float) -> None:
    """Adds groups settled before the index existed, as if settled now."""
    for key, payload in list(records.scan(Table.STATES)):
        state = common_pb2.GroupRecord.FromString(bytes(payload))
        if state.state in SETTLED_STATES and not state.settled_unix_s:
            state.settled_unix_s = now_unix_s
            index_settled(records, key.decode(), state)
            records.put(Table.STATES, key, state.SerializeToString())


def settled_after(records: Records, after: bytes) -> Iterator[SettledGroup]:
    """Settled groups that have records to free, the oldest first."""
    for key, value in records.scan_checksummed(Table.SETTLED, after=after):
        try:
            settled_unix_s, task_id = parse_settled_key(key)
            step = _STEP.unpack(open_value(Table.SETTLED, key, value))[0]
        except (DataLoss, ValueError, struct.error):
            yield SettledGroup(
                key=key, task_id=TaskId(""), settled_unix_s=0.0, step=0, damaged=True
            )
            continue
        yield SettledGroup(
            key=key,
            task_id=task_id,
            settled_unix_s=settled_unix_s,
            step=0 if step == _ORPHAN else step,
            orphan=step == _ORPHAN,
        )


def parse_settled_key(key: bytes) -> tuple[float, TaskId]:
    """Time of settlement and task of an entry. Raises ValueError or struct.error."""
    settled_ms: int = _SETTLED_KEY.unpack_from(key)[0]
    return settled_ms / _MS, TaskId(key[_SETTLED_KEY.size :].decode())


def settled_key(settled_unix_s: float, task_id: str) -> bytes:
    """Key of an entry."""
    return _SETTLED_KEY.pack(round(settled_unix_s * _MS)) + group_key(task_id)
