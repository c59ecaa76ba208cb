"""Orphans: trajectories without a group. They are found, tombstoned, and freed once old.

A scheduler stores a group before agents sample for it, so an orphan comes from a token of another
scheduler or shard, or is hand-made. Owns the search, a page of trajectories at a time, and the
mark: a tombstoned state without a group, whose age counts from then. A group that arrives later
replaces the mark.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.core.trajectory import TaskId
from forge.v1 import common_pb2
from services.pool.data.commands import MarkOrphans
from services.pool.storage.groups.settled_index import index_orphan
from services.pool.storage.keys import group_key, name_of_trajectory_key, task_prefix
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

ORPHAN_REASON = "its group never came"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanPage:
    """The result of one search."""

    task_ids: tuple[TaskId, ...]
    last_key: bytes
    """Look on after it; b"" at the end of the trajectories."""


def orphans_after(records: Records, after: bytes, *, limit: int) -> OrphanPage:
    """Tasks with trajectories and no state, among `limit` trajectories after a key.

    Only keys are read, so a damaged record does not end the search.
    """
    found: list[TaskId] = []
    task_id = ""
    for seen, (key, _) in enumerate(
        records.scan_checksummed(Table.TRAJECTORIES, after=after), start=1
    ):
        # The trajectories of a task lie together.
        if not key.startswith(task_prefix(task_id)):
            task_id = name_of_trajectory_key(key).task_id
            if not records.has(Table.STATES, group_key(task_id)):
                found.append(TaskId(task_id))
        if seen == limit:
            return OrphanPage(task_ids=tuple(found), last_key=key)
    return OrphanPage(task_ids=tuple(found), last_key=b"")


def mark(records: Records, command: MarkOrphans) -> int:
    """Tombstones the tasks that have no state yet; how many."""
    marked = 0
    for task_id in command.task_ids:
        if records.has(Table.STATES, group_key(task_id)):
            continue
        state = common_pb2.GroupRecord(
            state=common_pb2.GROUP_STATE_TOMBSTONED,
            reason=ORPHAN_REASON,
            settled_unix_s=command.now_unix_s,
        )
        records.put(Table.STATES, group_key(task_id), state.SerializeToString())
        index_orphan(records, task_id, state)
        marked += 1
    return marked
