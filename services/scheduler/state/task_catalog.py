"""The submitted tasks of the groups in memory, by id and by tag.

Owns the task messages; the queue has ids only. A payload stays while runners may ask for it, and a
task while its group is in memory, so memory follows the open groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from forge.core.queue.groups import Group, Phase
from forge.core.tasks.task_digest import task_digest
from forge.v1 import common_pb2

STATES = {
    Phase.BATCHED: common_pb2.GROUP_STATE_BATCHED,
    Phase.TRAINED: common_pb2.GROUP_STATE_TRAINED,
    Phase.TOMBSTONED: common_pb2.GROUP_STATE_TOMBSTONED,
    Phase.EVALUATED: common_pb2.GROUP_STATE_EVALUATED,
}
"""In the pool; all other phases are PENDING there."""


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One task."""

    digest: bytes
    task: bytes
    """A serialized Task: a fifth of the memory of a message."""

    @classmethod
    def of(cls, task: common_pb2.Task, *, digest: bytes, payload: bool = True) -> TaskEntry:
        """`digest` of the submitted task; b"" if `task` is that task. Without `payload`, removes it
        from `task`."""
        digest = digest or task_digest(task)
        if not payload:
            task.payload_json = ""
        return cls(digest, task.SerializeToString())


class Catalog:
    """The tasks of one term."""

    def __init__(self) -> None:
        self._entries: dict[str, TaskEntry] = {}
        self._tags: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def add(self, task: common_pb2.Task, *, digest: bytes = b"") -> None:
        """`digest` of the submitted task, because the pool may have freed its payload."""
        self.enter((task.task_id,), (TaskEntry.of(task, digest=digest),), (task.tag,))

    def enter(
        self, task_ids: Sequence[str], entries: Sequence[TaskEntry], tags: Sequence[str]
    ) -> None:
        """Add tasks, with the entry and the tag of each."""
        self._entries.update(zip(task_ids, entries, strict=True))
        for task_id, tag in zip(task_ids, tags, strict=True):
            if tag:
                self._tags[tag][task_id] = None

    def digest(self, task_id: str) -> bytes | None:
        """None for an unknown task."""
        entry = self._entries.get(task_id)
        return entry.digest if entry else None

    def task(self, task_id: str) -> common_pb2.Task:
        """A copy, with its payload unless it was dropped."""
        return common_pb2.Task.FromString(self._entries[task_id].task)

    def drop_payload(self, task_id: str) -> None:
        """Drop the payload of a group that will not be sampled again."""
        entry = self._entries[task_id]
        task = common_pb2.Task.FromString(entry.task)
        task.payload_json = ""
        self._entries[task_id] = TaskEntry(entry.digest, task.SerializeToString())

    def forget(self, task_id: str) -> None:
        """Remove a task."""
        tag = common_pb2.Task.FromString(self._entries.pop(task_id).task).tag
        if tag:
            del self._tags[tag][task_id]
            if not self._tags[tag]:
                del self._tags[tag]

    def tagged(self, tag: str) -> Sequence[str]:
        """Returns task ids in the order of `enter`; those of all tasks if `tag` is empty."""
        return tuple(self._tags.get(tag, ()) if tag else self._entries)

    def record(self, group: Group, *, payload: bool = False) -> common_pb2.GroupRecord:
        """The record of a group; with the `payload` of its task, unless that was dropped."""
        return record_of(group, self._entries[group.spec.task_id], payload=payload)


def record_of(group: Group, entry: TaskEntry, *, payload: bool = False) -> common_pb2.GroupRecord:
    """As `Catalog.record`."""
    task = common_pb2.Task.FromString(entry.task)
    if not payload:
        task.payload_json = ""
    return common_pb2.GroupRecord(
        task=task,
        task_digest=entry.digest,
        queue_index=group.spec.index,
        state=STATES.get(group.phase, common_pb2.GROUP_STATE_PENDING),
        batch_id=group.batch_id,
        step=group.step,
        reason=group.reason,
        pool_shard=group.spec.shard,
    )
