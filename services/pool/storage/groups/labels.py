"""The index of labels: which tasks have a tag, a scaffold, a user, a fact of metadata.

Owns its keys and the search for tasks with several labels. `group_index` keeps the entries equal to
the records of groups; a group that moved to another shard has none.

    labels    digest of the label(16 bytes) task ":"

The colon makes the order of tasks that of their trajectories.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from forge.core.trajectory import TaskId
from services.pool.storage.keys import task_prefix
from services.pool.storage.records import DamagedRecord, Records, is_intact_entry
from services.pool.storage.tables import Table

_DIGEST_BYTES = 16


class Labeled(Protocol):
    """A task, or a filter of tasks."""

    tag: str
    scaffold: str
    user: str

    @property
    def metadata(self) -> Mapping[str, str]:
        """Facts by key."""


def label_prefixes(labeled: Labeled) -> list[bytes]:
    """Starts of the keys of each label; a task's prefix follows."""
    labels = [(kind, "", getattr(labeled, kind)) for kind in ("tag", "scaffold", "user")]
    labels = [label for label in labels if label[2]]
    labels += [("metadata", key, value) for key, value in sorted(labeled.metadata.items())]
    return [
        # Kind and key hold no NUL.
        blake2b("\0".join(label).encode(), digest_size=_DIGEST_BYTES).digest()
        for label in labels
    ]


def label_keys(task: Task) -> list[bytes]:
    """The keys of a task's entries."""
    return [prefix + task_prefix(task.task_id) for prefix in label_prefixes(task)]


def task_of_label_key(key: bytes) -> TaskId:
    """The task of an entry. Raises ValueError."""
    return TaskId(key[_DIGEST_BYTES:-1].decode())


class Task(Labeled, Protocol):
    """A task with its id."""

    task_id: str


def has_labels(task: Labeled, wanted: Labeled) -> bool:
    """Whether a task has all labels of `wanted`."""
    return all(
        not getattr(wanted, kind) or getattr(wanted, kind) == getattr(task, kind)
        for kind in ("tag", "scaffold", "user")
    ) and all(task.metadata.get(key) == value for key, value in wanted.metadata.items())


def before(task: bytes) -> bytes:
    """Returns the position just before the first entry of this task."""
    # A colon follows a nine, and no byte of a task id is as high.
    return task[:-1] + b"9\xff"


def labeled_tasks(
    records: Records, labels: Sequence[bytes], *, after: bytes
) -> Iterator[tuple[bytes, bool]]:
    """Prefixes of tasks behind a position, in order, and whether the task has all labels.

    Each step looks up one entry of each label and continues at the last of them, so the cost is
    about that of the rarest label. Raises `DamagedRecord` for a damaged entry.
    """
    while True:
        found = [_next(records, label, after) for label in labels]
        if None in found:
            return
        tasks = [task for task in found if task is not None]
        last = max(tasks)
        whole = min(tasks) == last
        yield last, whole
        after = last if whole else before(last)


def _next(records: Records, label: bytes, after: bytes) -> bytes | None:
    """The first task with a label behind a position."""
    for key, value in records.scan_checksummed(Table.LABELS, prefix=label, after=label + after):
        if not is_intact_entry(key, value):
            message = f"the checksum of an entry of {Table.LABELS.value} does not match"
            raise DamagedRecord(message, table=Table.LABELS, key=key)
        return key[_DIGEST_BYTES:]
    return None
