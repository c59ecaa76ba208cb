"""Retention over a store, with a clock and a checkpoint that a test sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.pool.data.commands import FreeGroups, MarkOrphans
from services.pool.data.removal.freed_groups import Freed
from services.pool.readers import ReaderThreads
from services.pool.retention import Retention, RetentionPolicy
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.store import commit

MAX_AGE_S = 1000.0
SETTLED_S = 100.0
"""When `set_states` says that it is."""


class Direct:
    """Stands in for the writer: commits each command at once."""

    def __init__(self, store: PoolStore) -> None:
        self.store = store
        self.before: Callable[[], None] = lambda: None
        self.freed: list[Freed] = []

    async def ask(self, message: FreeGroups | MarkOrphans, *, timeout_s: float) -> Any:
        self.before()
        answer = commit(self.store, message)
        if isinstance(message, FreeGroups):
            self.freed.append(answer)
        return answer


class Sweeper:
    """A retention whose clock and checkpoint the test sets."""

    def __init__(self, store: PoolStore, readers: ReaderThreads) -> None:
        self.writer = Direct(store)
        self.covered_step = 0
        self.now_unix_s = SETTLED_S
        self._store, self._readers = store, readers

    async def sweep(self, *, keep_age_s: float = MAX_AGE_S, keep_bytes: int = 0) -> Freed:
        return await self.retention(keep_age_s=keep_age_s, keep_bytes=keep_bytes).sweep()

    def retention(self, *, keep_age_s: float = MAX_AGE_S, keep_bytes: int = 0) -> Retention:
        async def coverage() -> int:
            return self.covered_step

        return Retention(
            self._store,
            self.writer,
            self._readers,
            policy=RetentionPolicy(keep_age_s=keep_age_s, keep_bytes=keep_bytes),
            coverage=coverage,
            now_unix_s=lambda: self.now_unix_s,
        )


def records_of(store: PoolStore) -> dict[Table, int]:
    return store.read(lambda records: {table: records.count(table) for table in Table})
