"""A scan of every group: along the queue, then those whose entry in the queue is lost.

Owns the position of one scan, and its reconciliation. The queue is an index of `groups`, and both
have one entry for each group. When the pages told as many intact entries as there are groups, all
is well, at no cost. Otherwise one snapshot of the keys of both tables names the groups without an
intact entry: they are told by their records, and an error is logged for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forge.core.errors import DataLoss
from forge.runtime.telemetry import counter, log
from forge.v1 import pool_pb2
from services.pool import reads
from services.pool.keys import task_of_queue_key
from services.pool.records import Records, Table

PAGE_GROUPS, PAGE_BYTES = 512, 1 << 20
"""Of the groups in one message."""

_UNQUEUED = counter(
    "forge_pool_unqueued_groups_total", "Groups told by a scan although their queue entry is lost."
)

Read = Callable[[Callable[[Records], Any]], Any]


class GroupScan:
    """Each page sees a snapshot of its own."""

    def __init__(self, read: Read, *, brief: bool = False) -> None:
        """`read` gives a function one snapshot."""
        self._read = read
        self._brief = brief
        self._after = b""
        self._queued = 0
        """Groups told by an intact entry and a record."""
        self._unqueued: list[str] | None = None
        """Tasks that are still to be told, once the queue is at its end."""

    def next_page(
        self, *, limit: int = PAGE_GROUPS, limit_bytes: int = PAGE_BYTES
    ) -> Sequence[pool_pb2.ScanGroupsResponse] | None:
        """The next groups, which fit in one message; None at the end."""
        if self._unqueued is None:
            page: reads.GroupPage = self._read(
                lambda records: reads.groups(
                    records,
                    after=self._after,
                    limit=limit,
                    limit_bytes=limit_bytes,
                    brief=self._brief,
                )
            )
            self._after = page.last_key
            self._queued += page.whole
            if not page.last_key:
                self._unqueued = self._read(self._find_unqueued)
            return page.groups
        if not self._unqueued:
            return None
        task_ids, self._unqueued = self._unqueued[:limit], self._unqueued[limit:]
        found: Sequence[pool_pb2.ScanGroupsResponse] = self._read(
            lambda records: self._told(records, task_ids)
        )
        return found

    def _find_unqueued(self, records: Records) -> list[str]:
        if records.count(Table.GROUPS) == self._queued:
            return []
        # A group that came behind the scan's back has an entry, so it is not among them.
        queued = {
            task_of_queue_key(key)
            for key, value in records.scan_sealed(Table.QUEUE)
            if reads.is_intact_entry(key, value)
        }
        tasks = (key.decode() for key, _ in records.scan_sealed(Table.GROUPS))
        return [task_id for task_id in tasks if task_id not in queued]

    def _told(self, records: Records, task_ids: Sequence[str]) -> list[pool_pb2.ScanGroupsResponse]:
        told = []
        for task_id in task_ids:
            log.error("queue_entry_lost", task_id=task_id)
            _UNQUEUED.inc()
            try:
                told.append(reads.scanned_group(records, task_id, brief=self._brief))
            except DataLoss as error:
                log.error("group_not_readable", task_id=task_id, error=str(error))
        return told
