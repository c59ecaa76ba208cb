"""Groups that are over: how many are held, and how the others are found.

Owns the bound on settled groups in memory, and what is asked about those beyond it. One that is
not held, for it was settled long ago or a scan left it out, has its share of the counters; its
record is in the pool, where a duplicate of it, a late report and a repeated commit are looked up. A
list of groups (`services.scheduler.group_listing`) and a rewind that takes it back read it there,
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forge.core.queue.group_ledger import Books
from services.scheduler.state.messages import LookedUp, LookUp, Tagged
from services.scheduler.state.stored_group import StoredGroup
from services.scheduler.state.task_catalog import Catalog
from services.scheduler.validation import digest_of


class SettledGroups:
    """Of one term."""

    def __init__(self, books: Books, catalog: Catalog, *, most: float) -> None:
        """`most`: groups held that were trained on, and as many others."""
        self._books = books
        self._catalog = catalog
        self._most = most
        self._holds_all = False

    def hold_all(self) -> None:
        """From now on: a pool shard cannot look groups up."""
        self._holds_all = True

    def forget(self) -> None:
        """Let go of what is beyond the bound."""
        if not self._holds_all:
            for group in self._books.forget(most=self._most):
                self._catalog.forget(group.spec.task_id)

    def missing(
        self, task_ids: Iterable[str], looked_up: LookedUp, *, batch_id: str = ""
    ) -> LookUp | None:
        """What the pool has to be asked before it is known which of the tasks have settled groups,
        and which step committed the batch; None for nothing more."""
        shards = self._books.forgotten_shards
        unheld = (task_id for task_id in task_ids if task_id not in self._books)
        unknown = tuple(task_id for task_id in unheld if task_id not in looked_up.task_ids)
        if not shards or not (unknown or (batch_id and batch_id not in looked_up.batch_ids)):
            return None
        return LookUp(task_ids=unknown, batch_ids=(batch_id,) if batch_id else (), shards=shards)

    def is_known(self, task_id: str, digest: bytes, looked_up: LookedUp) -> bool | None:
        """Whether the content of a task that was accepted before is the same; None for a new
        one."""
        known = self._catalog.digest(task_id)
        if known is None and task_id in looked_up.groups:
            record = looked_up.groups[task_id]
            known = record.task_digest or digest_of(record.task)
        return None if known is None else known == digest

    def held(self, task_ids: Iterable[str]) -> Iterator[str]:
        return (task_id for task_id in task_ids if task_id in self._books)

    def tagged(self, tag: str) -> Tagged:
        """What is held of a tag, of every task for no tag, and the shards with groups beyond."""
        return Tagged(task_ids=self._catalog.tagged(tag), shards=self._books.forgotten_shards)

    def recall(self, groups: Iterable[StoredGroup], *, after: int) -> None:
        """Hold again what was trained after a step: all of it, of the shards that
        `Books.shards_to_recall` names."""
        by_task = {stored.group.spec.task_id: stored for stored in groups}
        recalled = self._books.recall((each.group for each in by_task.values()), after=after)
        for group in recalled:
            stored = by_task[group.spec.task_id]
            self._catalog.enter((group.spec.task_id,), (stored.entry,), (stored.tag,))
