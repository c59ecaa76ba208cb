"""Settled groups: the bound on those in memory, and look-ups of the others.

Owns that bound and the questions to the pool about groups beyond it. Such a group counts, but only
the pool has its record: duplicate submissions, late reports and repeated commits look it up there.
Lists (`services.scheduler.groups.group_listing`) and rewinds read it there, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forge.core.queue.group_ledger import GroupLedger
from forge.core.tasks.task_digest import task_digest
from services.scheduler.state.messages.groups import LookedUp, LookUp, Tagged
from services.scheduler.state.stored_group import StoredGroup
from services.scheduler.state.task_catalog import Catalog


class SettledGroups:
    """The settled groups of one term."""

    def __init__(self, ledger: GroupLedger, catalog: Catalog, *, most: float) -> None:
        """`most`: trained groups in memory, and as many other settled groups."""
        self._ledger = ledger
        self._catalog = catalog
        self._most = most
        self._holds_all = False

    def hold_all(self) -> None:
        """Keep all groups from now on, because a pool shard cannot look groups up."""
        self._holds_all = True

    def forget(self) -> None:
        """Remove groups beyond the bound from memory."""
        if not self._holds_all:
            for group in self._ledger.forget(most=self._most):
                self._catalog.forget(group.spec.task_id)

    def missing(
        self, task_ids: Iterable[str], looked_up: LookedUp, *, batch_id: str = ""
    ) -> LookUp | None:
        """The look-up that is needed to know which tasks have settled groups and which step
        committed the batch; None if all is known."""
        shards = self._ledger.forgotten_shards
        unheld = (task_id for task_id in task_ids if task_id not in self._ledger)
        unknown = tuple(task_id for task_id in unheld if task_id not in looked_up.task_ids)
        if not shards or not (unknown or (batch_id and batch_id not in looked_up.batch_ids)):
            return None
        return LookUp(task_ids=unknown, batch_ids=(batch_id,) if batch_id else (), shards=shards)

    def is_known(self, task_id: str, digest: bytes, looked_up: LookedUp) -> bool | None:
        """Whether an accepted task has the same content; None for a new task."""
        known = self._catalog.digest(task_id)
        if known is None and task_id in looked_up.groups:
            record = looked_up.groups[task_id]
            known = record.task_digest or task_digest(record.task)
        return None if known is None else known == digest

    def in_memory(self, task_ids: Iterable[str]) -> Iterator[str]:
        """Tasks whose groups are in memory."""
        return (task_id for task_id in task_ids if task_id in self._ledger)

    def tagged(self, tag: str) -> Tagged:
        """Returns the tasks of a tag, all tasks if `tag` is empty, and the shards that may have
        more."""
        return Tagged(task_ids=self._catalog.tagged(tag), shards=self._ledger.forgotten_shards)

    def recall(self, groups: Iterable[StoredGroup], *, after: int) -> None:
        """Restore groups trained after a step, see `GroupLedger.recall`."""
        by_task = {stored.group.spec.task_id: stored for stored in groups}
        recalled = self._ledger.recall((stored.group for stored in by_task.values()), after=after)
        for group in recalled:
            stored = by_task[group.spec.task_id]
            self._catalog.enter((group.spec.task_id,), (stored.entry,), (stored.tag,))
