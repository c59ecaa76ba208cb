"""Scans of groups, page by page; each page is a snapshot of its own.

    GroupScan     every group: along the queue, then those without a queue entry
    BoundedScan   pending groups, then the newest settled ones
    TaskScan      groups by task id
    ErasedScan    erased groups

Owns the position of a scan and its reconciliation: an index has one entry per group. If fewer
intact entries were read than there are groups, one snapshot of the keys finds the groups without an
entry; they are read by their records, and an error is logged for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from forge.core.errors import DataLoss
from forge.core.trajectory import TaskId
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.reads import reads
from services.pool.metrics import UNQUEUED_GROUPS
from services.pool.storage import erasures
from services.pool.storage.groups import indexed_groups, settled_counts
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

PAGE_GROUPS, PAGE_BYTES = 512, 1 << 20
"""Most groups, and bytes of groups, in one message."""


T = TypeVar("T")
Page = Sequence[pool_pb2.ScanGroupsResponse]


class ReadSnapshot(Protocol):
    """Reads one snapshot."""

    def __call__(self, look: Callable[[Records], T]) -> T:
        """Returns the result of `look`."""


class GroupScan:
    """Every group."""

    def __init__(
        self,
        read: ReadSnapshot,
        *,
        brief: bool = False,
        table: Table = Table.QUEUE,
        prefix: bytes = b"",
    ) -> None:
        """`read` runs a function in one snapshot. `table` is another index of places in the queue
        and `prefix` the start of its keys, for some of the groups; those are not reconciled
        here."""
        self._read = read
        self._brief = brief
        self._table = table
        self._prefix = prefix
        self._after = b""
        self._queued = 0
        """Groups with an intact entry and a record so far."""
        self.damaged = 0
        """Damaged entries so far."""
        self._unqueued: list[TaskId] | None = None
        """Tasks to return after the end of the index; None before it."""

    def next_page(self) -> Page | None:
        """The next groups, which fit in one message; None at the end."""
        if self._unqueued is None:
            page = self._read(
                lambda records: reads.groups(
                    records,
                    after=self._after,
                    limit=PAGE_GROUPS,
                    limit_bytes=PAGE_BYTES,
                    brief=self._brief,
                    table=self._table,
                    prefix=self._prefix,
                )
            )
            self._after = page.last_key
            self._queued += page.whole
            self.damaged += page.damaged
            if not page.last_key:
                whole = self._table is not Table.QUEUE
                self._unqueued = [] if whole else self._read(self._find_unqueued)
            return page.groups
        if not self._unqueued:
            return None
        task_ids = self._unqueued[:PAGE_GROUPS]
        self._unqueued = self._unqueued[PAGE_GROUPS:]
        return self._read(partial(groups_by_record, task_ids=task_ids, brief=self._brief))

    def _find_unqueued(self, records: Records) -> list[TaskId]:
        if records.count(Table.GROUPS) == self._queued:
            return []
        # A group that came behind the scan's back has an entry, so it is not among them.
        return list(indexed_groups.without_entry(records, Table.QUEUE))


def groups_by_record(records: Records, *, task_ids: Sequence[TaskId], brief: bool) -> Page:
    """Groups without an index entry, read by their records."""
    groups = []
    for task_id in task_ids:
        log.error("queue_entry_lost", task_id=task_id)
        UNQUEUED_GROUPS.inc()
        try:
            groups.append(reads.scanned_group(records, task_id, brief=brief))
        except DataLoss as error:
            log.error("group_not_readable", task_id=task_id, error=str(error))
    return groups


class TaskScan:
    """The groups of tasks, in brief."""

    def __init__(
        self, read: ReadSnapshot, task_ids: Sequence[TaskId], *, absent: bool = False
    ) -> None:
        """`absent`: tasks without a group count as moved, else they are skipped."""
        self._read = read
        self._left = task_ids
        self._absent = absent

    def next_page(self) -> Page | None:
        """The next groups, as in the other scans; None at the end."""
        if not self._left:
            return None
        page, taken = self._read(
            lambda records: reads.groups_of(
                records,
                self._left,
                limit=PAGE_GROUPS,
                limit_bytes=PAGE_BYTES,
                absent=self._absent,
            )
        )
        self._left = self._left[taken:]
        return page


class BoundedScan:
    """Pending groups in queue order, then the newest settled ones, in brief."""

    def __init__(self, read: ReadSnapshot, newest: indexed_groups.NewestSettled) -> None:
        self._read = read
        self._pending = GroupScan(read, brief=True, table=Table.PENDING)
        self._settled = TaskScan(read, newest.task_ids)
        self._lost: list[TaskId] | None = None

    def next_page(self) -> Page | None:
        """The next groups, as in the other scans; None at the end."""
        if self._lost is None:
            page = self._pending.next_page()
            if page is not None:
                return page
            self._lost = self._read(indexed_groups.unindexed) if self._pending.damaged else []
        if self._lost:
            task_ids, self._lost = self._lost[:PAGE_GROUPS], self._lost[PAGE_GROUPS:]
            return self._read(partial(groups_by_record, task_ids=task_ids, brief=True))
        return self._settled.next_page()


class ErasedScan:
    """Erased groups, with id, state and reason alone."""

    def __init__(self, read: ReadSnapshot, task_ids: Sequence[TaskId] | None) -> None:
        """`task_ids`: the tasks to look at; None for all."""
        self._read = read
        self._left = task_ids
        self._after: str | None = ""

    def next_page(self) -> Page | None:
        """The next groups, as in the other scans; None at the end."""
        if self._left is None:
            return self._next_of_all()
        if not self._left:
            return None
        page, self._left = self._left[:PAGE_GROUPS], self._left[PAGE_GROUPS:]
        return self._read(
            lambda records: [
                reads.erased_group(records, task_id)
                for task_id in page
                if erasures.is_erased(records, task_id)
            ]
        )

    def _next_of_all(self) -> Page | None:
        if self._after is None:
            return None
        after = self._after

        def look(records: Records) -> tuple[list[TaskId], Page]:
            task_ids = erasures.erased_tasks(records, after=after, limit=PAGE_GROUPS)
            return task_ids, [reads.erased_group(records, task_id) for task_id in task_ids]

        task_ids, page = self._read(look)
        self._after = task_ids[-1] if task_ids else None
        return page


Scan = GroupScan | TaskScan | BoundedScan | ErasedScan


def find_newest_settled(records: Records, *, limit: int) -> indexed_groups.NewestSettled | None:
    """None if an index lacks an entry: then only the queue has every group."""
    if not indexed_groups.is_whole(records):
        log.error("group_index_incomplete", groups=records.count(Table.GROUPS))
        return None
    return indexed_groups.newest_settled(records, limit)


def count_settled(records: Records, found: pool_pb2.SettledGroups) -> bool:
    """Adds the counters; False if they cannot be read."""
    try:
        for row in settled_counts.group_counts(records):
            found.counts.add(
                purpose=common_pb2.Purpose.ValueType(row.purpose),
                state=common_pb2.GroupState.ValueType(row.state),
                domain=row.domain,
                reason=row.reason,
                groups=row.groups,
                rollouts=row.rollouts,
            )
        for recent in settled_counts.recent_rollouts(records):
            counted = found.recent.add(domain=recent.domain)
            for sealed_unix_s, trajectory in recent.rollouts:
                outcome = reads.outcome_of(records, trajectory)
                if outcome is not None:
                    counted.sealed_unix_s.append(sealed_unix_s)
                    counted.outcomes.append(outcome)
    except DataLoss as error:
        log.error("settled_counts_damaged", error=str(error))
        return False
    found.next_train_index = indexed_groups.next_queue_index(records, common_pb2.PURPOSE_TRAIN)
    found.next_eval_index = indexed_groups.next_queue_index(records, common_pb2.PURPOSE_EVAL)
    return True
