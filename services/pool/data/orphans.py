"""Trajectories whose group never came: they are found, given up, and freed once they are old.

A scheduler stores a group before anybody samples for it, so nobody will train on what has none: it
was written with a token of another scheduler or shard, or by hand. Owns the search, a page of
trajectories at a time, and the mark: a state without a group, tombstoned, whose age counts from
then. What is due is for `retention` to say, freeing is in `freeing`. A group that comes after all
takes the place of the mark.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.core.trajectory import TaskId
from forge.v1 import common_pb2
from services.pool.data.commands import MarkOrphans
from services.pool.storage.keys import group_key, name_of_trajectory_key, task_prefix
from services.pool.storage.records import Records
from services.pool.storage.settled_index import index_orphan
from services.pool.storage.tables import Table

ORPHAN_REASON = "its group never came"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanPage:
    """What one look found."""

    task_ids: tuple[TaskId, ...]
    last_key: bytes
    """Look on after it; b"" at the end of the trajectories."""


def orphans_after(records: Records, after: bytes, *, limit: int) -> OrphanPage:
    """Tasks that have trajectories and no state, among `limit` trajectories behind a key.

    Keys tell: a damaged record does not end the search.
    """
    found: list[TaskId] = []
    task_id = ""
    for seen, (key, _) in enumerate(records.scan_sealed(Table.TRAJECTORIES, after=after), start=1):
        # The trajectories of a task lie together.
        if not key.startswith(task_prefix(task_id)):
            task_id = name_of_trajectory_key(key).task_id
            if not records.has(Table.STATES, group_key(task_id)):
                found.append(TaskId(task_id))
        if seen == limit:
            return OrphanPage(task_ids=tuple(found), last_key=key)
    return OrphanPage(task_ids=tuple(found), last_key=b"")


def mark(records: Records, command: MarkOrphans) -> int:
    """Gives up those of the tasks that have no state yet; how many."""
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
