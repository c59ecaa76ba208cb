"""One TCP connection; its reads and writes block a thread, never the event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

from xxhash import xxh3_64_digest

from forge.core.errors import Unavailable

TICKET_BYTES = 32
ACCEPTED = b"\x06"
"""Sent for a right ticket, before the data."""
SEND_S = 60.0
"""Longest time in which the other side takes one slice."""

T = TypeVar("T")


class BulkError(Unavailable):
    """A bulk connection that failed."""


class BulkUnreachable(BulkError):
    """A bulk connection that was not opened, or refused."""


class BulkConnection:
    """Sends or receives the data of slices."""

    def __init__(self, sock: socket.socket, threads: Executor | None = None) -> None:
        """`sock` has the timeout of a read; without `threads` those of the event loop work."""
        self._sock = sock
        self._threads = threads
        self._work: asyncio.Future[Any] | None = None

    async def send(self, slices: Sequence[memoryview]) -> None:
        """Send data. Raises `BulkError`."""
        await self._run(_send, slices)

    async def receive(self, room: memoryview) -> bytes:
        """Fill `room`; return its digest, as `slice_digests`. Raises `BulkError`."""
        return await self._run(_receive, room)

    def end(self) -> None:
        """End a read or write that runs, and all later ones."""
        # The method of SSLSocket would continue without TLS.
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close it once no thread uses it or the memory of a slice."""
        self.end()
        if self._work is not None:
            await asyncio.wait({self._work})
            # Otherwise asyncio logs the error of a cancelled caller.
            self._work.exception()
        self._sock.close()

    async def _run(self, work: Callable[[socket.socket, Any], T], argument: object) -> T:
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, work, self._sock, argument)
        self._work = running
        try:
            return await asyncio.shield(running)
        except OSError as error:
            raise BulkError(f"the bulk connection: {error}") from None


def _send(sock: socket.socket, slices: Sequence[memoryview]) -> None:
    for data in slices:
        until_s, sent = time.monotonic() + SEND_S, 0
        while sent < len(data):
            sock.settimeout(left_of(until_s))
            sent += sock.send(data[sent:])


def _receive(sock: socket.socket, room: memoryview) -> bytes:
    got = 0
    while got < len(room):
        count = sock.recv_into(room[got:])
        if not count:
            raise ConnectionResetError("the source closed it")
        got += count
    return xxh3_64_digest(room)


def left_of(until_s: float) -> float:
    """Return the seconds until a time of `time.monotonic`. Raises `TimeoutError` after it."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
