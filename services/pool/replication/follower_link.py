"""A leader and its follower: what the follower lacks, what it confirms, and who waits for that.

Owns the way of commits to the follower (`Link`) and the answers that wait until it has them
(`Gate`). The leader commits first and sends then, so a follower never has what its leader lacks.
Whether the shard acknowledges alone is for `replica` to say; by itself a gate stays shut.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from forge.core.errors import DeadlineExceeded, ForgeError, InvalidArgument, Unavailable
from forge.runtime.rpc.chunks import split
from forge.runtime.telemetry import log
from forge.v1 import replica_pb2 as pb
from services.pool.metrics import CATCH_UPS, REPLICA_LAG
from services.pool.readers import Readers
from services.pool.storage.journal import (
    Changes,
    ReplicaState,
    all_records,
    can_catch_up,
    can_continue_copy,
    caught_up_message,
    commit_message,
    keys_changed,
    present_values,
    state_of,
)
from services.pool.storage.records import Records
from services.pool.store import PoolStore

MAX_UNSENT_BYTES = 256 << 20
"""Of commits that wait for a follower; one that falls further behind starts anew."""
RETRY_S = 0.5

T = TypeVar("T")


class Gate:
    """Answers of a leader pass when enough replicas have what they tell on disk."""

    def __init__(self, shard: str, *, position: int, leads: Callable[[], bool]) -> None:
        self.position = position
        """Of the newest commit here."""
        self._leads = leads
        self._shard = shard
        self._confirmed = 0
        self.required = False
        """Answers wait for the follower."""
        self._shut = "no follower has joined yet"
        """Why nothing is acknowledged; "" when it is."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_shut(self) -> bool:
        return bool(self._shut)

    def admit(self) -> None:
        """Raises `Unavailable` for a change that could not be acknowledged."""
        if not self._leads():
            raise Unavailable(f"this instance of pool shard {self._shard} leads no more")
        if self._shut:
            raise Unavailable(
                f"pool shard {self._shard} acknowledges nothing: {self._shut}",
                retry_after_s=RETRY_S,
            )

    async def passed(self, *, timeout_s: float) -> None:
        """Returns once everything committed by now may be told.

        Raises `Unavailable` when it may not, `DeadlineExceeded` when that takes too long.
        """
        position = self.position
        if not self.required:
            self.admit()
            return
        if self._confirmed >= position:
            return
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((position, confirmed))
        try:
            async with asyncio.timeout(timeout_s):
                await confirmed
        except TimeoutError:
            raise DeadlineExceeded(
                f"the follower of pool shard {self._shard} did not confirm in time"
            ) from None

    def confirm(self, position: int) -> None:
        """The follower has everything up to `position` on disk."""
        self._confirmed = max(self._confirmed, position)
        REPLICA_LAG.set(self.position - self._confirmed)
        # In order of position: each was the newest when it came.
        while self._waiting and self._waiting[0][0] <= self._confirmed:
            _settle(self._waiting.popleft()[1], None)

    def require(self, confirmed: int) -> None:
        """From now on answers wait for a follower that has everything up to `confirmed`."""
        self.required, self._confirmed = True, confirmed

    def open(self) -> None:
        """Changes are taken."""
        self._shut = ""

    def go_alone(self) -> None:
        """This replica is the only one in sync: answers wait for nobody."""
        self.required, self._shut = False, ""
        self._release(None)

    def shut(self, why: str) -> None:
        """Nothing is acknowledged, neither what comes nor what waits."""
        self.required, self._shut = False, why
        self._release(
            Unavailable(
                f"pool shard {self._shard} cannot acknowledge what it stored: {why}",
                retry_after_s=RETRY_S,
            )
        )

    def _release(self, error: ForgeError | None) -> None:
        while self._waiting:
            _settle(self._waiting.popleft()[1], error)


def _settle(future: asyncio.Future[None], error: ForgeError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class CatchUp:
    """What a follower lacks, page by page; each page is a snapshot of its own.

    A page may be newer than commits that are sent after it. The follower takes them all the same,
    in order: once it has taken the commit that the newest page shows, it is where the leader was
    then. So no snapshot is held for long, and the writer waits for nobody.
    """

    def __init__(self, state: ReplicaState, follower: pb.FollowerState, *, term: int) -> None:
        """`state` was read after commits began to be gathered for the follower, under the
        leadership `term`."""
        self.reached = state.position
        """Position that the newest page shows."""
        self._term = term
        self._keys: list[pb.RecordKey] = []
        self._next = self._end = state.position
        """The journal is read from the one to the other."""
        self._copying = not can_catch_up(state, follower)
        self._after: pb.RecordKey | None = None
        """The last that was copied."""
        self.way = "copy"
        """Of all records; or the `rest` of a copy that was cut short, or by the `journal`."""
        if not self._copying:
            self.way = "journal"
            self._keys, self._next = list(follower.touched), follower.agreed_position
        elif can_continue_copy(state, follower, term=term):
            self.way = "rest"
            self._next, self._after = follower.copied.complete_position, follower.copied.last

    def begin(self, lineage: str) -> pb.FollowStep:
        """What the follower is told first."""
        return pb.FollowStep(
            begin=pb.FollowBegin(
                lineage=lineage,
                from_scratch=self.way == "copy",
                continues_copy=self.way == "rest",
            )
        )

    def page(self, records: Records, *, sent: int) -> pb.FollowStep | None:
        """None when there is no more. Every commit up to `sent` has gone to the follower.

        Raises `FailedPrecondition` when the journal was cut off.
        """
        if self._keys or self._next < self._end:
            page = self._changed(records)
        elif self._copying:
            page = self._copied(records, sent)
        else:
            return None
        self.reached = max(self.reached, page.position)
        return pb.FollowStep(copy=page)

    def _changed(self, records: Records) -> pb.RecordChanges:
        if not self._keys:
            self._keys, self._next = keys_changed(records, after=self._next, up_to=self._end)
        page, taken = present_values(records, self._keys)
        self._keys = self._keys[taken:]
        return page

    def _copied(self, records: Records, sent: int) -> pb.RecordChanges:
        page, self._copying = all_records(records, after=self._after)
        if self._copying:
            self._after = page.changes[-1].record
            page.copied.CopyFrom(
                pb.CopyProgress(term=self._term, last=self._after, complete_position=sent)
            )
        return page


@dataclass(frozen=True, slots=True)
class _Commit:
    position: int
    changes: Changes
    size_bytes: int


class Link:
    """One follower, for as long as its call lasts."""

    def __init__(
        self,
        store: PoolStore,
        readers: Readers,
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
        """Position of what was asked to be confirmed, and since when."""
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
        """Nothing more will come of it."""
        if not self.ended.done():
            self.ended.set_result(why)
        self._news.set()
        self._progress.set()

    async def reached(self, position: int) -> None:
        """Returns once the follower has it on disk. Raises what ended the link."""
        while not self.confirmed or self.confirmed < position:
            if self.ended.done():
                raise self.ended.result()
            self._progress.clear()
            await self._progress.wait()

    async def responses(
        self, requests: AsyncIterator[pb.FollowRequest]
    ) -> AsyncIterator[pb.FollowResponse]:
        """What the follower is sent, while its confirmations are taken in."""
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
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _steps(self) -> AsyncIterator[bytes]:
        state = await self._read(state_of)
        catch_up = CatchUp(state, self._follower, term=self._term)
        CATCH_UPS.labels(catch_up.way).inc()
        log.info("follower_catches_up", replica=self.replica_id, way=catch_up.way)
        yield catch_up.begin(self._lineage).SerializeToString()
        # What was sent before a page was read is older than the page.
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
                    raise InvalidArgument("a follower tells its state once")
                self._confirm(request.durable_position)
            self.end(Unavailable("the follower hung up"))
        except ForgeError as error:
            self.end(error)

    def _confirm(self, position: int) -> None:
        self.confirmed = position
        while self._unconfirmed and self._unconfirmed[0][0] <= position:
            self._unconfirmed.popleft()
        self._on_confirmed(position)
        self._progress.set()

    async def _watch(self) -> None:
        """A follower that is frozen keeps its connection: its silence is what tells."""
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
