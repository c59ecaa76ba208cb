"""Groups that are over: how many stay in memory, and what is known of the others.

Owns the bound on groups that are settled and held. One that is beyond it leaves its share of the
counts and 24 bytes; what a duplicate of it, a late report and a repeated commit are answered is as
before. Its record is in the pool: a list of groups (`services.scheduler.listing`) and a rewind that
takes it back read it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forge.core.queue.group_digests import CONTENT_BYTES, Forgotten
from forge.core.queue.group_ledger import Books
from services.scheduler.catalog import Catalog
from services.scheduler.messages import Tagged
from services.scheduler.stored import StoredGroup

MOST_SETTLED = 65_536
"""Groups held that were trained on, and as many that were tombstoned or evaluated: some 90 MB each
with eight rollouts. A rewind takes back no more, as a rule."""


class SettledGroups:
    """Of one term."""

    def __init__(self, books: Books, catalog: Catalog, *, most: int) -> None:
        self._books = books
        self._catalog = catalog
        self._most = most
        self._tags = Forgotten()
        """Of groups that are forgotten."""

    def forget(self) -> None:
        """Let go of what is beyond the bound."""
        gone = self._books.forget(most=self._most, digest_of=self._catalog.known_digest)
        for group in gone:
            if tag := self._catalog.forget(group.spec.task_id):
                self._tags.add(tag, b"")

    def is_known(self, task_id: str, digest: bytes) -> bool | None:
        """Whether the content of a task that was accepted before is the same; None for a new one.

        Of a group that is forgotten, 64 bits of the digest are compared.
        """
        known = self._catalog.digest(task_id)
        if known is not None:
            return known == digest
        content = self._books.forgotten.content(task_id)
        return None if content is None else content == digest[:CONTENT_BYTES]

    def held(self, task_ids: Iterable[str]) -> Iterator[str]:
        """Those that are not forgotten."""
        return (task_id for task_id in task_ids if not self._books.is_forgotten(task_id))

    def tagged(self, tag: str) -> Tagged:
        """What is held of a tag, and where the rest is; of every task for no tag."""
        beyond = tag in self._tags if tag else len(self._books.forgotten) > 0
        return Tagged(
            task_ids=self._catalog.tagged(tag),
            shards=frozenset(self._books.forgotten_shards) if beyond else frozenset(),
        )

    def shards_to_recall(self, step: int) -> frozenset[str]:
        """Pool shards with groups that a rewind to `step` takes back and that are forgotten."""
        needed = self._books.must_recall(step)
        return frozenset(self._books.forgotten_shards) if needed else frozenset()

    def recall(self, groups: Iterable[StoredGroup], *, after: int) -> None:
        """Hold again what was trained after a step: all of it, as `shards_to_recall` has it."""
        for stored in groups:
            task_id = stored.group.spec.task_id
            if self._books.is_forgotten(task_id):
                self._books.recall((stored.group,), after=after)
                if not self._books.is_forgotten(task_id):
                    self._catalog.enter((task_id,), (stored.entry,), (stored.tag,))
        self._books.recall((), after=after)
