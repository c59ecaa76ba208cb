"""Trajectories as they close or are rewarded, followed from the pool while a page watches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

from forge.core.errors import ForgeError
from forge.runtime.concurrency.tasks import first_done
from forge.v1 import common_pb2, pool_pb2
from services.console.data.topics import Cursor, News, Topic, encode
from services.console.data.trajectories.rows import summary_row
from services.console.metrics import READS

KEPT = 200
AGAIN_S = 1.0


class Closes(Topic):
    """The newest changes; a page that reads slowly misses some, and learns how many."""

    name: ClassVar[str] = "closes"

    def __init__(
        self,
        news: News,
        tail: Callable[[], AsyncIterator[pool_pb2.TailTrajectoriesResponse]],
    ) -> None:
        """`tail` yields the changes from now on."""
        super().__init__(news)
        self._tail = tail
        self._rows: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._count = 1
        """One above the number of rows so far."""

    def since(self, cursor: Cursor) -> tuple[bytes | None, Cursor]:
        """The rows after a cursor, as far as they are kept; a new page gets none."""
        now = (self._count, 0)
        if cursor == now:
            return None, cursor
        new = self._count - cursor[0] if cursor[0] else 0
        rows = list(self._rows)[-new:] if new else []
        return encode({"rows": rows, "missed": new - len(rows)}), now

    async def run(self) -> None:
        """Follows while watched."""
        while True:
            await self.watched.wait()
            await first_done(self._follow(), self.unwatched())

    async def _follow(self) -> None:
        while True:
            try:
                async for response in self._tail():
                    if response.change:
                        self.add(response.summary)
            except ForgeError:
                READS.labels(self.name, "failed").inc()
            await asyncio.sleep(AGAIN_S)

    def add(self, summary: common_pb2.TrajectorySummary) -> None:
        """Add a trajectory that closed, or was rewarded after it."""
        self._rows.append(summary_row(summary))
        self._count += 1
        READS.labels(self.name, "ok").inc()
        self._news.tell()
