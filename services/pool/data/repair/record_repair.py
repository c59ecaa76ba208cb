"""Repair of damaged records from another copy of the shard.

An intact record is never overwritten by an older one. A closed trajectory becomes exactly what its
digests say; records that the copy lacks, such as rewards after a backup, come from the shard
itself. States of groups, the change log, the index of settled groups and `meta` come only from a
replica with every commit of this one: an older state could have a group trained twice. The queue is
rebuilt from the records of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from forge.v1 import common_pb2
from services.pool.data.closed_digests import (
    digest_of,
    is_compared,
    marks_of,
    rewards_damage,
    turns_damage,
)
from services.pool.data.commands import RepairUnit
from services.pool.data.summaries import header_of
from services.pool.storage.erasures import erased_group, is_erased
from services.pool.storage.journal import replica_state
from services.pool.storage.keys import name_of_trajectory_key, queue_key
from services.pool.storage.record_copies import (
    CopiedRecords,
    intact_values,
    opens,
    stored_values,
)
from services.pool.storage.records import (
    Records,
    checksum_of,
    checksummed_value,
    decode_header,
    intact_header,
    open_value,
)
from services.pool.storage.tables import Key, Table

_Put = Callable[[Table, bytes, bytes | None], None]
_Values = Mapping[bytes, bytes]
"""Records of one table as they lie on disk."""


def repair_from_replica(records: Records, command: RepairUnit) -> bool:
    """Repairs a unit of a served shard; whether it is whole then."""
    copy, since = command.copy, command.since
    if copy.position >= since and not replica_state(records).copying:
        repair_unit(records, unit=command.unit, copy=copy, since=since, replicated=command.leads)
    return is_whole(records, command.unit)


def repair_unit(
    ours: Records, *, unit: Key, copy: CopiedRecords, since: int, replicated: bool = False
) -> None:
    """Replaces the damaged records of `unit` that `copy` has.

    `since`: position that a copy must show to have every commit of this one. `replicated`:
    followers get the repair with this commit.
    """
    table, key = unit
    current = 0 < since <= copy.position
    put = partial(ours.put_checksummed, replicated=replicated)
    match table:
        case Table.TRAJECTORIES if _of_erased_task(ours, key):
            for record, _ in list(stored_values(ours, unit)):
                put(*record, None)
        case Table.TRAJECTORIES:
            _repair_trajectory(ours, key, copy, put)
        case Table.GROUPS:
            _restore(ours, unit, copy, put)
            if current:
                _restore(ours, (Table.STATES, key), copy, put)
            _queue_again(ours, key, put)
        case Table.QUEUE:
            if not _opens(ours, unit):
                put(table, key, None)
        case _:
            # A record that is gone was deleted meanwhile.
            if current and ours.has(table, key):
                _restore(ours, unit, copy, put)


def _of_erased_task(records: Records, trajectory: bytes) -> bool:
    return is_erased(records, name_of_trajectory_key(trajectory).task_id)


def _restore(ours: Records, record: Key, copy: CopiedRecords, put: _Put) -> None:
    if record in copy.values and not _opens(ours, record):
        table, key = record
        value = copy.values[record]
        if table is Table.GROUPS and is_erased(ours, key.decode()):
            # The copy may be older than the erasure.
            group = common_pb2.GroupRecord.FromString(bytes(open_value(table, key, value)))
            value = checksummed_value(key, erased_group(group).SerializeToString())
        put(*record, value)


def _repair_trajectory(ours: Records, trajectory: bytes, copy: CopiedRecords, put: _Put) -> None:
    place = (Table.TRAJECTORIES, trajectory)
    own = intact_header(trajectory, ours.get_checksummed(*place))
    copied = copy.values.get(place)
    header = own or (None if copied is None else decode_header(open_value(*place, copied)))
    if header is None:
        return
    wanted: dict[Key, bytes] = {}
    if not header.freed:
        stored = CopiedRecords(values=intact_values(ours, place), position=0)
        for table, digest in (
            (Table.TURNS, header.turns_digest),
            (Table.REWARDS, header.rewards_digest),
        ):
            # Intact records here may be newer than the copy, or replacements of lost ones.
            candidates: list[_Values] = [{**copy.of(table), **stored.of(table)}, copy.of(table)]
            if is_compared(header):
                candidates = [each for each in candidates if _digest(table, each) == digest]
            if not candidates:
                return
            wanted.update({(table, key): value for key, value in candidates[0].items()})
    if own is None and copied is not None:
        put(*place, copied)
    there = {record: value for record, value in stored_values(ours, place) if record != place}
    for record, value in wanted.items():
        if there.get(record) != value:
            put(*record, value)
    # Only a digest shows that a record does not belong here.
    for record in there if is_compared(header) else ():
        if record not in wanted:
            put(*record, None)


def _digest(table: Table, values: _Values) -> bytes:
    return digest_of(
        (key, checksum_of(key, open_value(table, key, values[key]))) for key in sorted(values)
    )


def _queue_again(ours: Records, task: bytes, put: _Put) -> None:
    """Stores the queue entry of an intact group if it is missing."""
    place = _place_of(ours, task)
    if place is not None and not _opens(ours, (Table.QUEUE, place)):
        put(Table.QUEUE, place, checksummed_value(place))


def _place_of(records: Records, task: bytes) -> bytes | None:
    """Key of a group in the queue; None if it is absent or damaged."""
    if not _opens(records, (Table.GROUPS, task)):
        return None
    group = common_pb2.GroupRecord.FromString(bytes(records.get(Table.GROUPS, task) or b""))
    return queue_key(group.task.purpose, group.queue_index, group.task.task_id)


def _opens(records: Records, record: Key) -> bool:
    value = records.get_checksummed(*record)
    return value is not None and opens(record, value)


def is_whole(records: Records, unit: Key) -> bool:
    """True if every record of a unit is intact, and a closed trajectory is complete."""
    table, key = unit
    if not all(opens(record, value) for record, value in stored_values(records, unit)):
        return False
    if table is Table.GROUPS:
        place = _place_of(records, key)
        return place is None or _opens(records, (Table.QUEUE, place))
    header = header_of(records, key) if table is Table.TRAJECTORIES else None
    if header is None or not is_compared(header):
        return True
    turns = marks_of(records, Table.TURNS, key)
    rewards = marks_of(records, Table.REWARDS, key)
    return not (turns_damage(header, turns) or rewards_damage(key, header, rewards))
