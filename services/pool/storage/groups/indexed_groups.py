"""Reads groups through the indexes: pending ones, and a bounded number of settled ones.

Not here: the indexes (`group_index`), and the records of a scan
(`services.pool.data.reads.group_scan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge.core.trajectory import TaskId
from services.pool.storage.groups.group_index import (
    INDEXED_STATES,
    MOVED,
    MS,
    ORDER,
    OTHER,
    TRAINED,
    state_of,
    task_of_entry,
)
from services.pool.storage.keys import place_of_queue_key, task_of_queue_key
from services.pool.storage.records import Records, is_intact_entry
from services.pool.storage.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestSettled:
    """The settled groups of a bounded scan, and where it stops."""

    task_ids: list[TaskId]
    """The longest settled first: those that were trained, then the others."""
    left_out_step: int
    """Last step that trained a group that is left out; 0 when none is."""
    left_out_unix_s: float
    """Time at which the newest of the other groups left out was settled; 0: none is left out."""


def is_whole(records: Records) -> bool:
    """Whether the indexes have as many groups as are stored."""
    indexed = records.count(Table.PENDING) + records.count(Table.SETTLED_ORDER)
    return indexed == records.count(Table.GROUPS)


def newest_settled(records: Records, limit: int) -> NewestSettled:
    """At least `limit` groups that were trained, to the end of a step, and `limit` others."""
    trained: list[TaskId] = []
    step = 0
    for order, task_id in _backwards(records, TRAINED):
        if len(trained) >= limit and order != step:
            step = order
            break
        trained.append(task_id)
        step = order
    else:
        step = 0
    others: list[TaskId] = []
    left_out_ms = 0
    for order, task_id in _backwards(records, OTHER):
        if len(others) >= limit:
            left_out_ms = order
            break
        others.append(task_id)
    return NewestSettled(
        task_ids=trained[::-1] + others[::-1],
        left_out_step=step,
        left_out_unix_s=left_out_ms / MS,
    )


def trained_after(records: Records, step: int) -> list[TaskId]:
    """Groups that are trained, by a later step, in the order of steps."""
    after = ORDER.pack(TRAINED, min(step + 1, 2**64 - 1))
    found = []
    for key, _ in records.scan_checksummed(Table.SETTLED_ORDER, after=after):
        if key[0] != TRAINED:
            break
        found.append(task_of_entry(Table.SETTLED_ORDER, key))
    return found


def unindexed(records: Records) -> list[TaskId]:
    """Groups that are not settled and have no intact entry among the pending."""
    missing = without_entry(records, Table.PENDING)
    return [each for each in missing if state_of(records, each).state not in INDEXED_STATES]


def without_entry(records: Records, table: Table) -> Iterator[TaskId]:
    """Groups that have no intact entry in an index of places in the queue."""
    entered = {
        task_of_queue_key(key)
        for key, value in records.scan_checksummed(table)
        if is_intact_entry(key, value)
    }
    tasks = (TaskId(key.decode()) for key, _ in records.scan_checksummed(Table.GROUPS))
    return (task_id for task_id in tasks if task_id not in entered)


def not_moved(records: Records, limit: int) -> list[TaskId]:
    """Settled groups, then pending ones, that did not move to another shard."""
    found: list[TaskId] = []
    for table in (Table.SETTLED_ORDER, Table.PENDING):
        for key, value in records.scan_checksummed(table):
            if len(found) == limit:
                return found
            if table is Table.SETTLED_ORDER and key[0] == MOVED:
                break
            if is_intact_entry(key, value):
                found.append(task_of_entry(table, key))
    return found


def next_queue_index(records: Records, purpose: int) -> int:
    """One above the highest queue index of a purpose."""
    last = next(records.keys_backwards(Table.QUEUE, prefix=bytes([purpose])), None)
    return 0 if last is None else place_of_queue_key(last)[1] + 1


def _backwards(records: Records, kind: int) -> Iterator[tuple[int, TaskId]]:
    """Settled groups of a kind, the last first, each with its step or time."""
    for key in records.keys_backwards(Table.SETTLED_ORDER, prefix=bytes([kind])):
        yield ORDER.unpack_from(key)[1], task_of_entry(Table.SETTLED_ORDER, key)
