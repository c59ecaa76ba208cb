"""The bulk port of a process, and one stream of data for each call that has a connection.

A connection without the ticket of a waiting call is closed before a byte is sent. Connections, with
and without a ticket, are bounded; calls beyond send over gRPC.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

from forge.core.errors import ConfigError
from forge.runtime.security.tls import Tls
from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.telemetry import log
from forge.runtime.weights.bulk.connection import (
    ACCEPTED,
    TICKET_BYTES,
    BulkConnection,
    left_of,
)
from forge.v1.inference_pb2 import BulkOffer

MOST_STREAMS = 16
MOST_UNKNOWN = 32
"""Connections whose ticket is not read yet; further ones are closed at once."""
WAIT_S = 5.0
"""Longest wait for the connection of a call, and for the ticket of a connection."""
_DOORS = 8
_PAUSE_S = 1.0


class BulkServer:
    """Listens from the first call on that accepts a connection."""

    def __init__(
        self,
        security: Tls,
        settings: BulkSettings,
        *,
        host: str,
        rank: int = 0,
        wait_s: float = WAIT_S,
    ) -> None:
        """`rank`: number of the trainer's rank on this host."""
        self._security = security
        self._place = host.strip("[]"), settings.port and settings.port + rank
        self._enabled = settings.enabled
        self._wait_s = wait_s
        self._listener: socket.socket | None = None
        self._streams: dict[bytes, BulkStream] = {}
        """By ticket."""
        self._unknown = 0
        self._doors = ThreadPoolExecutor(_DOORS, thread_name_prefix="bulk-door")
        self._senders = ThreadPoolExecutor(MOST_STREAMS, thread_name_prefix="bulk")

    def stream(self) -> BulkStream | None:
        """Return a stream to offer to a caller; None: there is none now."""
        if not self._enabled or len(self._streams) >= MOST_STREAMS:
            return None
        listener = self._listener or self._listen()
        if listener is None:
            return None
        stream = BulkStream(
            BulkOffer(port=listener.getsockname()[1], ticket=secrets.token_bytes(TICKET_BYTES)),
            threads=self._senders,
            wait_s=self._wait_s,
            ended=self._ended,
        )
        self._streams[stream.offer.ticket] = stream
        return stream

    def close(self) -> None:
        """Stop listening, and end all streams."""
        self._enabled = False
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
        for stream in self._streams.values():
            stream.end()
        self._doors.shutdown(wait=False)
        self._senders.shutdown(wait=False)

    def _listen(self) -> socket.socket | None:
        host, _ = self._place
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            if self._security.connection_context() is None:
                self._security.require_plain_allowed(host)
            listener = socket.create_server(
                self._place, family=family, dualstack_ipv6=host == "::", backlog=MOST_UNKNOWN
            )
        except (OSError, ConfigError) as error:
            self._enabled = False
            log.warning("weight_bulk_not_offered", port=self._place[1], error=str(error))
            return None
        listener.setblocking(False)
        self._listener = listener
        self._look()
        return listener

    def _look(self) -> None:
        if self._enabled and self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # No file descriptors: the connection would wake the loop again and again.
            log.warning("weight_bulk_not_accepted", error=str(error))
            loop.remove_reader(self._listener.fileno())
            loop.call_later(_PAUSE_S, self._look)
            return
        if self._unknown >= MOST_UNKNOWN:
            sock.close()
            return
        self._unknown += 1
        admitted = self._doors.submit(self._admit, sock)
        admitted.add_done_callback(partial(self._tell, loop))

    def _admit(self, sock: socket.socket) -> tuple[socket.socket, bytes]:
        """Return the connection, with TLS, and its ticket. Raises `OSError`. Blocks."""
        until_s = time.monotonic() + self._wait_s
        try:
            sock.settimeout(self._wait_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (context := self._security.connection_context()) is not None:
                sock = context.wrap_socket(sock, server_side=True)
            ticket = b""
            while len(ticket) < TICKET_BYTES:
                sock.settimeout(left_of(until_s))
                piece = sock.recv(TICKET_BYTES - len(ticket))
                if not piece:
                    raise ConnectionResetError("closed before its ticket")
                ticket += piece
        except OSError:
            sock.close()
            raise
        return sock, ticket

    def _tell(
        self, loop: asyncio.AbstractEventLoop, admitted: Future[tuple[socket.socket, bytes]]
    ) -> None:
        # The loop may have ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._admitted, admitted)

    def _admitted(self, admitted: Future[tuple[socket.socket, bytes]]) -> None:
        self._unknown -= 1
        if (error := admitted.exception()) is not None:
            log.info("weight_bulk_refused", error=str(error))
            return
        sock, ticket = admitted.result()
        stream = self._streams.get(ticket)
        if stream is None or not stream.take(sock):
            log.info("weight_bulk_refused", error="no call waits for its ticket")
            sock.close()

    def _ended(self, stream: BulkStream) -> None:
        self._streams.pop(stream.offer.ticket, None)


class BulkStream:
    """The data of one call; its end closes the connection."""

    def __init__(
        self,
        offer: BulkOffer,
        *,
        threads: Executor,
        wait_s: float,
        ended: Callable[[BulkStream], None],
    ) -> None:
        self.offer = offer
        self._threads = threads
        self._wait_s = wait_s
        self._ended = ended
        self._waits = True
        self._taken = asyncio.Event()
        self._connection: BulkConnection | None = None

    async def connected(self) -> bool:
        """Wait for the caller's connection; False: it did not come. Raises `BulkError`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                await self._taken.wait()
        self._waits = False
        if self._connection is not None:
            await self._connection.send([memoryview(ACCEPTED)])
        return self._connection is not None

    def take(self, sock: socket.socket) -> bool:
        """Use a connection with the ticket of this stream; False: there is one, or it is late."""
        if not self._waits or self._connection is not None:
            return False
        self._connection = BulkConnection(sock, self._threads)
        self._taken.set()
        return True

    async def send(self, slices: Sequence[memoryview]) -> None:
        """Send the data of slices. Raises `BulkError`."""
        assert self._connection is not None
        await self._connection.send(slices)

    def end(self) -> None:
        """End a send that runs, and all later ones."""
        if self._connection is not None:
            self._connection.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._waits = False
        self._ended(self)
        if self._connection is not None:
            await self._connection.close()
