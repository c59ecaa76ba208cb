"""Listeners to the records that transactions change.

    CommitChanges   one commit, for followers
    CompactionLog   since a copy of the file began, for the copy
    RecentChanges   the last commits, for incremental scans

Owns what each keeps in memory. The marks of scans belong to this process: after a restart, on
another replica, and once older than the kept changes, a mark is unknown: the scan returns every
group.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from forge.core.trajectory import TaskId
from services.pool.storage.tables import LOCAL, Key, Table

MOST_TASKS = 1 << 17
"""Tasks in `RecentChanges`: about 20 MiB of memory."""

_OF_GROUPS = frozenset({Table.GROUPS, Table.STATES, Table.TRAJECTORIES, Table.REWARDS})
"""Tables that a scan reads; their keys begin with a task id, and it holds no colon."""


class ChangeListener(Protocol):
    """Observes every write of a transaction, also of one that fails later."""

    def record_changed(
        self, table: Table, key: bytes, value: bytes | None, *, replicated: bool
    ) -> None:
        """`value` is the record on disk, None for a deleted one. `replicated`: followers get it
        with this commit."""

    def table_cleared(self, table: Table) -> None:
        """All records of a table were deleted."""


class CommitChanges:
    """The records that one commit changes, without those of this replica alone."""

    def __init__(self) -> None:
        self.records: dict[Key, bytes | None] = {}

    def record_changed(
        self, table: Table, key: bytes, value: bytes | None, *, replicated: bool
    ) -> None:
        """Keeps the last value."""
        if replicated and table not in LOCAL:
            self.records[table, key] = value

    def table_cleared(self, table: Table) -> None:
        """Keeps nothing: followers do not get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """The scope of an incremental scan."""

    mark: str
    """Mark for the next scan."""
    task_ids: Sequence[TaskId] | None
    """Tasks whose groups may have changed; None: every group."""


class RecentChanges:
    """The tasks that the last commits changed; written by the writer's thread, read by any."""

    def __init__(self, *, most_tasks: int = MOST_TASKS) -> None:
        self._most_tasks = most_tasks
        self._lock = threading.Lock()
        self._process = uuid.uuid4().hex
        self._committed = 0
        """Number of the newest commit that is on disk."""
        self._forgotten = 0
        """Every change by a later commit is kept."""
        self._changed: OrderedDict[bytes, int] = OrderedDict()
        """By task, the number of the last commit that changed it, the newest last; harmless if that
        commit failed."""

    def record_changed(
        self, table: Table, key: bytes, value: bytes | None, *, replicated: bool
    ) -> None:
        """Assigns the task of a group's record to the commit in progress."""
        if table not in _OF_GROUPS:
            return
        task, _, _ = key.partition(b":")
        with self._lock:
            self._changed[task] = self._committed + 1
            self._changed.move_to_end(task)
            if len(self._changed) > self._most_tasks:
                _, self._forgotten = self._changed.popitem(last=False)

    def table_cleared(self, table: Table) -> None:
        """Forgets every earlier mark."""
        if table in _OF_GROUPS:
            with self._lock:
                self._forgotten = self._committed + 1
                self._changed.clear()

    def committed(self) -> None:
        """Note that the commit in progress is on disk."""
        with self._lock:
            self._committed += 1

    def since(self, mark: str) -> Since:
        """The changes after `mark`. Call it before the groups are read."""
        with self._lock:
            newest = f"{self._process}:{self._committed}"
            process, _, digits = mark.partition(":")
            number = int(digits) if process == self._process and digits.isdecimal() else -1
            if not self._forgotten <= number <= self._committed:
                return Since(mark=newest, task_ids=None)
            later = takewhile(lambda each: each[1] > number, reversed(self._changed.items()))
            return Since(mark=newest, task_ids=[TaskId(task.decode()) for task, _ in later])


class CompactionLog:
    """The keys of records that changed since a copy of the file began."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """Most bytes of keys; beyond it the log is lost."""
        self.keys: dict[Key, None] = {}
        """In the order of their first change, those of a failed transaction included."""
        self.lost = ""
        """Reason why `keys` is incomplete; "" if it is complete."""
        self._size_bytes = 0

    def record_changed(
        self, table: Table, key: bytes, value: bytes | None, *, replicated: bool
    ) -> None:
        """Logs the key."""
        if self.lost or (table, key) in self.keys:
            return
        self.keys[table, key] = None
        self._size_bytes += len(key)
        if self._size_bytes > self.limit_bytes:
            self._lose(f"records with more than {self.limit_bytes} bytes of keys were changed")

    def table_cleared(self, table: Table) -> None:
        """A cleared table has no keys to log."""
        self._lose(f"the table {table.value} was cleared")

    def _lose(self, why: str) -> None:
        self.lost, self.keys = why, {}
