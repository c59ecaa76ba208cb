"""Damaged records of a shard that is not served, replaced by those of a replica or a backup.

Owns what may be taken from a copy. A closed trajectory is repaired only to exactly what its digests
say; what a copy has less is taken from the shard itself, such as a reward that came after the
backup. The state of a group is taken only from a replica that has every commit of this one: an
older one could have a group trained twice. The queue is rebuilt from the records of the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

import msgspec

from forge.core.errors import ConfigError, DataLoss
from forge.v1 import common_pb2
from services.pool.check import Damage
from services.pool.copies import Progress, check, snapshot
from services.pool.digests import digest_of, is_compared
from services.pool.environment import Environment
from services.pool.files import DATA, file_bytes
from services.pool.journal import state_of
from services.pool.keys import (
    LINEAGE_KEY,
    group_key,
    queue_key,
    task_of_queue_key,
    trajectory_of_turn_key,
)
from services.pool.reads import is_intact_entry
from services.pool.records import (
    Records,
    Table,
    TrajectoryHeader,
    checksum_of,
    open_value,
)
from services.pool.summaries import header_of

_MAP_MAX_BYTES = 1 << 40
_OF_TRAJECTORIES = frozenset({Table.TURNS, Table.TRAJECTORIES, Table.REWARDS})

Values = Mapping[bytes, bytes]
"""Records of one table as they lie on disk."""


def repair(directory: Path, source: Path, progress: Progress) -> list[Damage]:
    """Repairs the shard in `directory` from the copy in `source`; the damage that is left.

    Raises `InUse` while the shard is served, `ConfigError` when the copy is of another one, and as
    `check` does.
    """
    damage = list(check(directory, progress))
    if not damage:
        return []
    environment = Environment(
        directory,
        map_bytes=file_bytes(directory / DATA),
        map_max_bytes=_MAP_MAX_BYTES,
        max_readers=1,
    )
    try:
        with snapshot(source) as (transaction, databases):
            theirs = Records(transaction, databases)
            environment.write(partial(_repair, theirs=theirs, damage=damage, source=source))
    finally:
        environment.close()
    return list(check(directory, progress))


def _repair(ours: Records, *, theirs: Records, damage: Sequence[Damage], source: Path) -> None:
    lineages = [bytes(each.get(Table.META, LINEAGE_KEY) or b"") for each in (ours, theirs)]
    if lineages[0] != lineages[1] or not lineages[0]:
        raise ConfigError(f"{source} is no copy of this shard: its lineage is another one")
    for trajectory in sorted({_trajectory_of(one) for one in damage} - {b""}):
        _repair_trajectory(ours, theirs, trajectory)
    for one in damage:
        if one.table is Table.QUEUE and not _is_intact(ours, one.key):
            ours.delete(Table.QUEUE, one.key)
    for task_id in sorted({_task_of(one) for one in damage} - {""}):
        _repair_group(ours, theirs, task_id)


def _trajectory_of(damage: Damage) -> bytes:
    """Key of the trajectory that a damaged record is of; empty when it is of none."""
    match damage.table:
        case Table.TRAJECTORIES:
            return damage.key
        case Table.TURNS:
            return trajectory_of_turn_key(damage.key)
        case Table.REWARDS:
            return damage.key[: damage.key.find(b":") + 9]
        case _:
            return b""


def _task_of(damage: Damage) -> str:
    """The task that a damaged record of a group is of; empty when it is of none."""
    try:
        if damage.table is Table.QUEUE:
            return task_of_queue_key(damage.key)
        return damage.key.decode() if damage.table in (Table.GROUPS, Table.STATES) else ""
    except ValueError:
        return ""


def _repair_trajectory(ours: Records, theirs: Records, trajectory: bytes) -> None:
    own = _header(ours, trajectory)
    header = own or _header(theirs, trajectory)
    if header is None or header.freed:
        return
    wanted: dict[Table, Values] = {}
    for table, digest in (
        (Table.TURNS, header.turns_digest),
        (Table.REWARDS, header.rewards_digest),
    ):
        copied = _values(theirs, table, trajectory)
        # What is intact here may be newer than the copy, or stand in the place of what was lost.
        candidates = [{**copied, **_values(ours, table, trajectory)}, copied]
        if is_compared(header):
            candidates = [each for each in candidates if _digest(table, each) == digest]
        if not candidates:
            return
        wanted[table] = candidates[0]
    if own is None:
        value = theirs.get_sealed(Table.TRAJECTORIES, trajectory)
        ours.put_sealed(Table.TRAJECTORIES, trajectory, value)
    for table, values in wanted.items():
        stored = [key for key, _ in _stored(ours, table, trajectory)]
        for key in {*stored, *values}:
            ours.put_sealed(table, key, values.get(key))


def _header(records: Records, trajectory: bytes) -> TrajectoryHeader | None:
    """None when it is not there or cannot be read."""
    try:
        return header_of(records, trajectory)
    except (DataLoss, msgspec.MsgspecError):
        return None


def _stored(records: Records, table: Table, trajectory: bytes) -> list[tuple[bytes, bytes]]:
    entries = records.scan_sealed(table, after=trajectory)
    return list(takewhile(lambda entry: entry[0].startswith(trajectory), entries))


def _values(records: Records, table: Table, trajectory: bytes) -> dict[bytes, bytes]:
    """The intact ones of a trajectory."""
    return {
        key: value
        for key, value in _stored(records, table, trajectory)
        if _opens(table, key, value)
    }


def _opens(table: Table, key: bytes, value: bytes) -> bool:
    try:
        open_value(table, key, value)
    except DataLoss:
        return False
    return True


def _digest(table: Table, values: Values) -> bytes:
    return digest_of(
        (key, checksum_of(key, open_value(table, key, values[key]))) for key in sorted(values)
    )


def _is_intact(records: Records, key: bytes) -> bool:
    value = records.get_sealed(Table.QUEUE, key)
    return value is not None and is_intact_entry(key, value)


def _repair_group(ours: Records, theirs: Records, task_id: str) -> None:
    key = group_key(task_id)
    tables = [Table.GROUPS]
    own, other = state_of(ours), state_of(theirs)
    if own.lineage and own.lineage == other.lineage and other.position >= own.position:
        tables.append(Table.STATES)
    for table in tables:
        value = theirs.get_sealed(table, key)
        stored = ours.get_sealed(table, key)
        lost = stored is None or not _opens(table, key, stored)
        if lost and value is not None and _opens(table, key, value):
            ours.put_sealed(table, key, value)
    record = ours.get_sealed(Table.GROUPS, key)
    if record is None or not _opens(Table.GROUPS, key, record):
        return
    group = common_pb2.GroupRecord.FromString(bytes(open_value(Table.GROUPS, key, record)))
    place = queue_key(group.task.purpose, group.queue_index, task_id)
    if not _is_intact(ours, place):
        ours.put(Table.QUEUE, place, b"")
