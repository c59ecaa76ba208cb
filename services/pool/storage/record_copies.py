"""Intact records of one copy of a shard, read for the repair of another.

Owns both sides of FetchRecords. A repair unit is one key: a trajectory's stands for its header,
turns and rewards, a group's for record and state, any other for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.streams import flowing
from forge.v1 import replica_pb2 as pb
from services.pool.storage.journal import SENT, record_key, replica_state
from services.pool.storage.keys import (
    LINEAGE_KEY,
    SHARD_KEY,
    task_key_of_queue_key,
    trajectory_of_turn_key,
)
from services.pool.storage.records import DamagedRecord, Records, open_value
from services.pool.storage.tables import CONTENT, Key, Table

SILENCE_S = 30.0
_TABLES = {table.value: table for table in SENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRecords:
    """The intact records of one unit in a copy."""

    values: Mapping[Key, bytes]
    """The records as they lie on disk; every checksum matches."""
    position: int
    """The newest commit that they show; 0 for a copy that was never replicated."""

    def of(self, table: Table) -> dict[bytes, bytes]:
        """The records of one table."""
        return {key: value for (each, key), value in self.values.items() if each is table}


def units_of(table: Table, key: bytes) -> list[Key]:
    """The units to repair for a damaged record; none for a record of one replica alone."""
    if not key:
        return []  # The table cannot be read to its end.
    match table:
        case Table.TURNS:
            return [(Table.TRAJECTORIES, trajectory_of_turn_key(key))]
        case Table.REWARDS:
            # The task id holds no colon; two numbers follow the first one.
            return [(Table.TRAJECTORIES, key[: key.find(b":") + 9])]
        case Table.STATES:
            return [(Table.GROUPS, key)]
        case Table.QUEUE:
            return [(Table.QUEUE, key), (Table.GROUPS, task_key_of_queue_key(key))]
        case _:
            return [(table, key)] if table in SENT else []


def stored_values(records: Records, unit: Key) -> Iterator[tuple[Key, bytes]]:
    """Every record of a unit as stored, damaged or not."""
    table, key = unit
    for each in (table, Table.STATES) if table is Table.GROUPS else (table,):
        value = records.get_checksummed(each, key)
        if value is not None:
            yield (each, key), value
    if table is Table.TRAJECTORIES:
        for each in CONTENT:
            for found, value in records.scan_checksummed(each, prefix=key):
                yield (each, found), value


def intact_values(records: Records, unit: Key) -> dict[Key, bytes]:
    """The intact records of a unit."""
    return {record: value for record, value in stored_values(records, unit) if opens(record, value)}


def opens(record: Key, value: bytes) -> bool:
    """True if the checksum matches."""
    try:
        open_value(*record, value)
    except DamagedRecord:
        return False
    return True


def copied_records(records: Records, units: Iterable[Key]) -> CopiedRecords:
    """The intact records of units here. Raises `Unavailable` while this replica catches up."""
    state = replica_state(records)
    if state.copying:
        raise Unavailable("this replica is catching up: its records are not yet consistent")
    values: dict[Key, bytes] = {}
    for unit in units:
        values |= intact_values(records, unit)
    return CopiedRecords(values=values, position=state.position if state.lineage else 0)


# Any, as the stub's own type knows only blocking streams.
async def fetch_unit(stub: Any, *, shard: str, lineage: str, unit: Key) -> CopiedRecords:
    """The records of `unit` on the replica behind `stub`. Raises as FetchRecords in replica.proto
    specifies, and `DeadlineExceeded`."""
    source = f"the other replica of pool shard {shard}"
    request = pb.FetchRecordsRequest(pool_shard=shard, lineage=lineage, records=[record_key(*unit)])
    responses = stub.FetchRecords(request)
    joiner = Joiner()
    async for response in flowing(responses, silence_s=SILENCE_S, source=source):
        whole = joiner.add(response.records)
        if whole is not None:
            return _fetched(whole)
    raise Unavailable(f"{source} sent no records")


def _fetched(message: bytes) -> CopiedRecords:
    """The records of an answer, without those damaged on the way."""
    changes = pb.RecordChanges.FromString(message)
    values = {
        (_TABLES[each.record.table], each.record.key): each.value
        for each in changes.changes
        if each.record.table in _TABLES
    }
    intact = {record: value for record, value in values.items() if opens(record, value)}
    return CopiedRecords(values=intact, position=changes.position)


def answer(records: Records, request: pb.FetchRecordsRequest) -> bytes:
    """The serialized RecordChanges for `request`. Raises as FetchRecords in replica.proto
    specifies."""
    shard, lineage = records.meta_text(SHARD_KEY), records.meta_text(LINEAGE_KEY)
    if request.pool_shard != shard:
        raise InvalidArgument(f"pool_shard {request.pool_shard!r} is not here: this is {shard!r}")
    if not lineage or request.lineage != lineage:
        raise FailedPrecondition(
            f"pool shard {shard} is of lineage {lineage!r}, the caller's of {request.lineage!r}"
        )
    unknown = [each.table for each in request.records if each.table not in _TABLES]
    if unknown:
        raise InvalidArgument(f"records.table {unknown[0]!r} is not a table that replicas share")
    copied = copied_records(records, ((_TABLES[each.table], each.key) for each in request.records))
    changes = pb.RecordChanges(position=copied.position)
    for (table, key), value in copied.values.items():
        changes.changes.add(record=record_key(table, key), value=value)
    return changes.SerializeToString()
