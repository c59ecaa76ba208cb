"""One TCP connection; its reads and writes block a thread, never the event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress

from xxhash import xxh3_64_digest

from forge.core.errors import Unavailable

TICKET_BYTES = 32
ACCEPTED = b"\x06"
"""Sent for a right ticket, before the data."""
SEND_S = 60.0
"""Longest time in which the other side takes one piece, up to 4 MiB."""


class BulkError(Unavailable):
    """A bulk connection that failed."""


class BulkUnreachable(BulkError):
    """A bulk connection that was not opened, or refused."""


class BulkConnection:
    """Sends or receives the data of slices."""

    def __init__(
        self, sock: socket.socket, threads: Executor | None = None, *, silence_s: float = SEND_S
    ) -> None:
        """Reads fail after `silence_s` without data; without `threads` those of the event loop
        work."""
        self._sock = sock
        self._threads = threads
        self._silence_s = silence_s
        self._work: asyncio.Future[None] | None = None

    async def send(self, slices: Sequence[memoryview]) -> None:
        """Send data. Raises `BulkError`."""
        await self._run(_send, slices)

    async def receive(self, slices: Sequence[memoryview], digests: list[bytes]) -> None:
        """Fill memory; append the digest of each filled slice, as `slice_digests`. Raises
        `BulkError`."""
        await self._run(_receive, slices, digests, self._silence_s)

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

    async def _run(self, work: Callable[..., None], *arguments: object) -> None:
        loop = asyncio.get_running_loop()
        self._work = loop.run_in_executor(self._threads, work, self._sock, *arguments)
        try:
            await asyncio.shield(self._work)
        except OSError as error:
            raise BulkError(f"the bulk connection: {error}") from None


def _send(sock: socket.socket, slices: Sequence[memoryview]) -> None:
    for data in slices:
        until_s, sent = time.monotonic() + SEND_S, 0
        while sent < len(data):
            _limit(sock, socket.SO_SNDTIMEO, left_of(until_s))
            with _timeouts():
                sent += sock.send(data[sent:])


def _receive(
    sock: socket.socket, slices: Sequence[memoryview], digests: list[bytes], silence_s: float
) -> None:
    _limit(sock, socket.SO_RCVTIMEO, silence_s)
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    # With TLS each call returns at most one record, 16 KiB.
    receive = sock.recv_into
    with _timeouts():
        for room in slices:
            got, size_bytes = 0, len(room)
            while got < size_bytes:
                count = receive(room[got:], 0, flags)
                if not count:
                    raise ConnectionResetError("the source closed it")
                got += count
            digests.append(xxh3_64_digest(room))


def _limit(sock: socket.socket, option: int, limit_s: float) -> None:
    """Limit the time of a read or write. Without TLS the kernel does, and waits for all bytes:
    Python's own timeouts wake the thread for each piece."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(limit_s)
    else:
        sock.settimeout(None)
        micros = max(1, int(limit_s * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(micros, 1_000_000)))


@contextmanager
def _timeouts() -> Iterator[None]:
    """Raises `TimeoutError` where the kernel's limit ends a call."""
    try:
        yield
    except BlockingIOError:
        raise TimeoutError("timed out") from None


def left_of(until_s: float) -> float:
    """Return the seconds until a time of `time.monotonic`. Raises `TimeoutError` after it."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
