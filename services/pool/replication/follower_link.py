"""The link from a leader to its follower: catch-up first, then each commit.

Owns the unsent commits and the confirmed position. The leader commits before it sends, so a
follower never has a commit that its leader lacks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from forge.core.errors import ForgeError, InvalidArgument, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.chunks import split
from forge.runtime.telemetry import log
from forge.v1 import replica_pb2 as pb
from services.pool.metrics import CATCH_UPS
from services.pool.readers import ReaderThreads
from services.pool.replication.catch_up import CatchUp
from services.pool.storage.journal import (
    Changes,
    caught_up_message,
    commit_message,
    replica_state,
)
from services.pool.storage.records import Records
from services.pool.store import PoolStore

MAX_UNSENT_BYTES = 256 << 20
"""Most bytes of unsent commits; a follower further behind starts again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Commit:
    position: int
    changes: Changes
    size_bytes: int


class Link:
    """One follower, for the time of its call."""

    def __init__(
        self,
        store: PoolStore,
        readers: ReaderThreads,
        follower: pb.FollowerState,
        *,
        lineage: str,
        term: int,
        position: int,
        timeout_s: float,
        on_confirmed: Callable[[int], None],
    ) -> None:
        """`position` is the leader's: every later commit is `add`ed."""
        self.replica_id = follower.replica_id
        self.address = follower.address
        self.confirmed = 0
        self.ended: asyncio.Future[ForgeError] = asyncio.get_running_loop().create_future()
        self._store = store
        self._readers = readers
        self._follower = follower
        self._lineage = lineage
        self._term = term
        self._sent = position
        self._timeout_s = timeout_s
        self._on_confirmed = on_confirmed
        self._unsent: deque[_Commit] = deque()
        self._unsent_bytes = 0
        self._unconfirmed: deque[tuple[int, float]] = deque()
        """Positions that await confirmation, and since when."""
        self._news = asyncio.Event()
        self._progress = asyncio.Event()

    def add(self, position: int, changes: Changes) -> None:
        """One more commit of the leader."""
        size_bytes = sum(len(key) + len(value or b"") for (_, key), value in changes.items())
        self._unsent.append(_Commit(position, changes, size_bytes))
        self._unsent_bytes += size_bytes
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.end(Unavailable(f"the follower is {self._unsent_bytes} bytes behind"))
        self._news.set()

    def end(self, why: ForgeError) -> None:
        """Ends the link with a reason; later calls keep the first one."""
        if not self.ended.done():
            self.ended.set_result(why)
        self._news.set()
        self._progress.set()

    async def reached(self, position: int) -> None:
        """Returns once the follower has the commit on disk. Raises the reason of the link's end."""
        while not self.confirmed or self.confirmed < position:
            if self.ended.done():
                raise self.ended.result()
            self._progress.clear()
            await self._progress.wait()

    async def responses(
        self, requests: AsyncIterator[pb.FollowRequest]
    ) -> AsyncIterator[pb.FollowResponse]:
        """Yields steps for the follower and reads its confirmations."""
        tasks = {
            asyncio.create_task(self._take_in(requests)),
            asyncio.create_task(self._watch()),
        }
        try:
            async for step in self._steps():
                for chunk in split(step):
                    yield pb.FollowResponse(step=chunk)
        finally:
            self.end(Unavailable("the follower's stream ended"))
            await cancel_and_wait(*tasks)

    async def _steps(self) -> AsyncIterator[bytes]:
        state = await self._read(replica_state)
        catch_up = CatchUp(state, self._follower, term=self._term)
        CATCH_UPS.labels(catch_up.way).inc()
        log.info("follower_catches_up", replica=self.replica_id, way=catch_up.way)
        yield catch_up.begin(self._lineage).SerializeToString()
        # A step that was sent before a page was read is older than the page.
        while (page := await self._read(partial(catch_up.page, sent=self._sent))) is not None:
            yield page.SerializeToString()
            while self._unsent:
                yield await self._next_commit()
        while self._sent < catch_up.reached:
            yield await self._next_commit()
        self._unconfirmed.append((self._sent, time.monotonic()))
        yield caught_up_message(self._sent, state.terms)
        while True:
            step = await self._next_commit()
            self._unconfirmed.append((self._sent, time.monotonic()))
            yield step

    async def _next_commit(self) -> bytes:
        while not self._unsent:
            if self.ended.done():
                raise self.ended.result()
            self._news.clear()
            await self._news.wait()
        commit = self._unsent.popleft()
        self._unsent_bytes -= commit.size_bytes
        self._sent = commit.position
        return commit_message(commit.position, commit.changes)

    async def _take_in(self, requests: AsyncIterator[pb.FollowRequest]) -> None:
        try:
            async for request in requests:
                if request.WhichOneof("message") != "durable_position":
                    raise InvalidArgument("a follower may send its state only once")
                self._confirm(request.durable_position)
            self.end(Unavailable("the follower disconnected"))
        except ForgeError as error:
            self.end(error)

    def _confirm(self, position: int) -> None:
        self.confirmed = position
        while self._unconfirmed and self._unconfirmed[0][0] <= position:
            self._unconfirmed.popleft()
        self._on_confirmed(position)
        self._progress.set()

    async def _watch(self) -> None:
        """Ends the link of a silent follower: a frozen one keeps its connection."""
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            if self._unconfirmed:
                silent_s = time.monotonic() - self._unconfirmed[0][1]
                if silent_s > self._timeout_s:
                    self.end(
                        Unavailable(f"the follower has confirmed nothing for {silent_s:.1f} s")
                    )

    async def _read(self, look: Callable[[Records], T]) -> T:
        return await self._readers.run(lambda: self._store.read(look))
