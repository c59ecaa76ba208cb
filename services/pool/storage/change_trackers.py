"""Trackers of what commits change, in memory: for incremental scans, and for a copy in the making.

Owns the marks of scans with a bounded record of the groups that changed since (`RecentChanges`),
and the records that changed while a copy is made (`Notes`). Marks are this process's: after a
restart, and on another replica, every mark is unknown, and so is one from before what the record
holds. A mark that is known is never wrong, however the file changed under it: what is noted is each
record that a transaction writes.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from forge.core.trajectory import TaskId
from services.pool.storage.tables import Key, Table

MOST_TASKS = 1 << 17
"""In the record: some 20 MiB of memory."""

_OF_GROUPS = frozenset({Table.GROUPS, Table.STATES, Table.TRAJECTORIES, Table.REWARDS})
"""Tables that a scan reads; their keys begin with a task id, and it holds no colon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """What a scan is to tell."""

    mark: str
    """Of the next scan."""
    task_ids: Sequence[TaskId] | None
    """Tasks whose groups may have changed; None: all there are."""


class RecentChanges:
    """Noted by the thread that commits, asked by any."""

    def __init__(self, *, most_tasks: int = MOST_TASKS) -> None:
        self._most_tasks = most_tasks
        self._lock = threading.Lock()
        self._process = uuid.uuid4().hex
        self._committed = 0
        """Number of the newest commit that is on disk."""
        self._forgotten = 0
        """The record has every change by a commit after this one."""
        self._changed: OrderedDict[bytes, int] = OrderedDict()
        """By task, the number of the last commit that changed it, the newest last. One that failed
        changed nothing; that it is noted does no harm."""

    def note(self, table: Table, key: bytes) -> None:
        """A record is written by the commit that is being made."""
        if table not in _OF_GROUPS:
            return
        task, _, _ = key.partition(b":")
        with self._lock:
            self._changed[task] = self._committed + 1
            self._changed.move_to_end(task)
            if len(self._changed) > self._most_tasks:
                _, self._forgotten = self._changed.popitem(last=False)

    def lose(self, table: Table) -> None:
        """The commit that is being made clears a table: no mark from before it is known."""
        if table in _OF_GROUPS:
            with self._lock:
                self._forgotten = self._committed + 1
                self._changed.clear()

    def committed(self) -> None:
        """What was noted is on disk."""
        with self._lock:
            self._committed += 1

    def since(self, mark: str) -> Since:
        """To be asked before what is told is read."""
        with self._lock:
            newest = f"{self._process}:{self._committed}"
            process, _, digits = mark.partition(":")
            number = int(digits) if process == self._process and digits.isdecimal() else -1
            if not self._forgotten <= number <= self._committed:
                return Since(mark=newest, task_ids=None)
            later = takewhile(lambda each: each[1] > number, reversed(self._changed.items()))
            return Since(mark=newest, task_ids=[TaskId(task.decode()) for task, _ in later])


class Notes:
    """Which records were changed, for who brings a copy of them up to date."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """Of keys; beyond it the notes are lost."""
        self.keys: dict[Key, None] = {}
        """In the order in which they were changed first, those of a failed transaction included."""
        self.lost = ""
        """Why `keys` does not tell all; "" when it does."""
        self._size_bytes = 0

    def add(self, table: Table, key: bytes) -> None:
        if self.lost or (table, key) in self.keys:
            return
        self.keys[table, key] = None
        self._size_bytes += len(key)
        if self._size_bytes > self.limit_bytes:
            self.lose(f"records with more than {self.limit_bytes} bytes of keys were changed")

    def lose(self, why: str) -> None:
        self.lost, self.keys = why, {}
