"""Check of the indexes and counters of groups against the records they are made from.

Counters are compared only if all of these can be read; the damage itself is reported elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import lmdb
import msgspec

from forge.core.errors import DataLoss
from forge.v1 import common_pb2
from services.pool.storage.groups import settled_counts
from services.pool.storage.groups.group_index import (
    INDEXES,
    SETTLED_STATES,
    counted_rollouts,
    entries_of,
    stored_groups,
    task_of_entry,
)
from services.pool.storage.groups.group_records import group_record, group_state
from services.pool.storage.records import Records
from services.pool.storage.tables import Key, Table

Found = tuple[Table, bytes, str]
"""Table, key and defect."""


def index_damage(records: Records, *, readable: bool) -> Iterator[Found | None]:
    """Damage; None for each group and entry checked. `readable`: every record of groups, states and
    trajectories is intact."""
    counts = settled_counts.SettledCounts()
    for group, state in stored_groups(records):
        yield None
        for table, key in entries_of(group, state):
            if not records.has(table, key):
                yield table, key, "is not there, though its group is"
        if state.state in SETTLED_STATES and readable:
            counts.enter(group, state, counted_rollouts(records, group))
    for table in INDEXES:
        for key, _ in records.scan_checksummed(table):
            yield None
            if (table, key) not in _entries_now(records, table, key):
                yield table, key, "its group is not there, or elsewhere by now"
    if readable:
        yield from _counts_damage(records, counts)


def _entries_now(records: Records, table: Table, key: bytes) -> list[Key]:
    with suppress(DataLoss, ValueError):
        task_id = task_of_entry(table, key)
        group, state = group_record(records, task_id), group_state(records, task_id)
        return entries_of(group, state or common_pb2.GroupRecord()) if group else []
    return [(table, key)]


def _counts_damage(
    records: Records, expected: settled_counts.SettledCounts
) -> Iterator[Found | None]:
    stored: Counter[tuple[object, ...]] = Counter()
    try:
        for row in settled_counts.group_counts(records):
            key = (row.purpose, row.state, row.domain, row.reason)
            stored[(*key, "groups")] += row.groups
            stored[(*key, "rollouts")] += row.rollouts
        for commit in settled_counts.commits(records):
            for step, groups in commit.groups.items():
                stored["commit", commit.batch_id, step] += groups
        for _ in settled_counts.recent_rollouts(records):
            yield None
    except (DataLoss, lmdb.Error, msgspec.MsgspecError):
        return  # Reported with the checksums of the table.
    counted: Counter[tuple[object, ...]] = Counter()
    for key, (groups, rollouts) in expected.rows().items():
        counted[(*key, "groups")] += groups
        counted[(*key, "rollouts")] += rollouts
    for (batch_id, step), groups in expected.commits().items():
        counted["commit", batch_id, step] += groups
    for what in sorted(counted.keys() | stored.keys(), key=str):
        if counted[what] != stored[what]:
            named = " ".join(map(str, what))
            problem = f"{named}: counted {stored[what]}, but there are {counted[what]}"
            yield Table.SETTLED_COUNTS, b"", problem
