"""One TailTrajectories call: the change log from a cursor on, then its new entries.

Owns cursors, the wake-up when the log grows, and the end of a stalled reader. Unsent entries stay
in the log: a reader costs one page of memory, and the writer does not know it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from forge.client.stored.filters import check_filter
from forge.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from forge.v1 import pool_pb2
from services.pool.data.reads.trajectory_filter import summary_if_fits
from services.pool.data.summaries import header_of
from services.pool.readers import ReaderRef
from services.pool.storage.change_log import changes_after, newest_change
from services.pool.storage.records import Records
from services.pool.store import PoolStore

MAX_TAILS = 256
PAGE_ENTRIES = 256
"""Most entries read in one snapshot."""
PAGE_BYTES = 1 << 20
POLL_S = 1.0
"""Longest delay of a change when the writer sends no wake-up, as after its restart."""
STALL_S = 60.0
"""Longest wait of one response for its reader."""

T = TypeVar("T")
Send = Callable[[pool_pb2.TailTrajectoriesResponse], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Entries of the log in one snapshot."""

    responses: list[tuple[int, pool_pb2.TailTrajectoriesResponse]]
    """With the number of its entry."""
    last: int
    """Number of the last entry looked at."""
    ended: bool
    """True at the end of the log."""


def read_log(
    records: Records, wanted: pool_pb2.TrajectoryFilter, *, shard: str, after: int
) -> LogPage:
    """The entries after `after` that fit; deleted trajectories are skipped."""
    responses: list[tuple[int, pool_pb2.TailTrajectoriesResponse]] = []
    last = after
    size_bytes = 0
    for seen, (number, change) in enumerate(changes_after(records, after)):
        if seen == PAGE_ENTRIES or size_bytes >= PAGE_BYTES:
            return LogPage(responses=responses, last=last, ended=False)
        last = number
        header = header_of(records, change.trajectory)
        if header is None:
            continue
        summary = summary_if_fits(records, wanted, change.trajectory, header)
        if summary is not None:
            kind = pool_pb2.TrajectoryChange.ValueType(change.kind)
            response = pool_pb2.TailTrajectoriesResponse(
                cursor=cursor_text(shard, number), change=kind, summary=summary
            )
            responses.append((number, response))
            size_bytes += summary.ByteSize()
    return LogPage(responses=responses, last=last, ended=True)


def cursor_text(shard: str, number: int) -> str:
    """The cursor behind an entry."""
    return f"{shard}/{number}"


def first_number(records: Records, request: pool_pb2.TailTrajectoriesRequest, *, shard: str) -> int:
    """The entry after which `request` begins. Raises `InvalidArgument` for a cursor of another
    shard, `FailedPrecondition` for one of its future."""
    newest = newest_change(records)
    if not request.cursor:
        return 0 if request.from_start else newest
    owner, _, number = request.cursor.rpartition("/")
    if not number.isdecimal() or len(number) > 20:
        raise InvalidArgument(f"cursor {request.cursor[:80]!r} is not a cursor of a pool")
    if owner != shard:
        raise InvalidArgument(f"cursor {request.cursor[:80]!r} is not of pool shard {shard!r}")
    if int(number) > newest:
        raise FailedPrecondition(
            f"cursor {request.cursor} lies behind the newest change {newest} of the shard, which "
            "was restored from an older copy: begin at its start"
        )
    return int(number)


class Tails:
    """All open TailTrajectories calls of an instance."""

    def __init__(self, store: PoolStore, readers: ReaderRef, *, stall_s: float = STALL_S) -> None:
        self._store = store
        self._readers = readers
        self._stall_s = stall_s
        self._open = 0
        self._grown = asyncio.Event()
        self._draining = False
        self._unsent: set[asyncio.Future[None]] = set()

    def announce(self) -> None:
        """Wakes every tail: the log has grown."""
        self._grown.set()
        self._grown = asyncio.Event()

    def drain(self) -> None:
        """Ends every tail."""
        self._draining = True
        self.announce()

    async def follow(self, request: pool_pb2.TailTrajectoriesRequest, send: Send) -> None:
        """Sends the entries for `request` until the call is cancelled. Raises `Unavailable` once
        the instance drains, `ResourceExhausted` for a stalled reader."""
        check_filter(request.filter)
        if self._open >= MAX_TAILS:
            raise ResourceExhausted(f"{self._open} tails are open already", retry_after_s=1.0)
        self._open += 1
        try:
            await self._follow(request, send)
        finally:
            self._open -= 1

    async def _follow(self, request: pool_pb2.TailTrajectoriesRequest, send: Send) -> None:
        shard = self._store.shard
        last = await self._read(partial(first_number, request=request, shard=shard))
        # With a first cursor a reader can resume even if no entry ever fits.
        await self._send(
            send, pool_pb2.TailTrajectoriesResponse(cursor=cursor_text(shard, last)), last
        )
        sent_number = last
        while not self._draining:
            grown = self._grown
            page = await self._read(
                partial(read_log, wanted=request.filter, shard=shard, after=last)
            )
            for number, response in page.responses:
                await self._send(send, response, sent_number)
                sent_number = number
            last = page.last
            if last - sent_number >= PAGE_ENTRIES:
                # A reader whose filter is narrow would otherwise resume far back.
                cursor = cursor_text(shard, last)
                await self._send(
                    send, pool_pb2.TailTrajectoriesResponse(cursor=cursor), sent_number
                )
                sent_number = last
            if page.ended:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(grown.wait(), POLL_S)
        raise Unavailable(
            f"this pool instance is draining: resume from cursor {cursor_text(shard, sent_number)}"
        )

    async def _read(self, look: Callable[[Records], T]) -> T:
        return await self._readers.run(partial(self._store.read, look))

    async def _send(
        self, send: Send, response: pool_pb2.TailTrajectoriesResponse, resume_after: int
    ) -> None:
        """Raises `ResourceExhausted` if the reader does not take it in time."""
        sent = asyncio.ensure_future(send(response))
        try:
            done, _ = await asyncio.wait({sent}, timeout=self._stall_s)
        except asyncio.CancelledError:
            sent.cancel()
            raise
        if not done:
            # It ends with the call; grpc takes no second message before it.
            self._unsent.add(sent)
            sent.add_done_callback(self._forget)
            raise ResourceExhausted(
                f"a response was not taken for {self._stall_s:g} s: resume from cursor "
                f"{cursor_text(self._store.shard, resume_after)}"
            )
        sent.result()

    def _forget(self, sent: asyncio.Future[None]) -> None:
        self._unsent.discard(sent)
        if not sent.cancelled():
            sent.exception()
