"""HTTP connections: their number, the deadline of a request header, and that of a client that does
not read its answer.

Owns these limits; aiohttp has none of them. Not here: the deadline of a body (`Edge.read_body`) and
of an idle connection (aiohttp's keepalive timeout).
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from services.gateway.config import ConnectionSettings
from services.gateway.http.bodies import unsupported_encoding
from services.gateway.http.errors import Failure, openai_error
from services.gateway.metrics import CONNECTIONS, REFUSED

LINGER_S = 10.0
"""Longest time to read the rest of a refused body, so that its client reads the answer."""
UNSENT_BYTES = 1 << 17
"""Of an answer in the kernel that wait for the client: Linux would keep megabytes, by its measure
of the connection. Sent bytes do not count, so no client receives more slowly."""
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


class Connections:
    """The open connections of one server, by peer address."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self._by_address: Counter[str] = Counter()
        self._open = 0
        CONNECTIONS.set_function(lambda: self._open)

    def admit(self, address: str) -> bool:
        """Counts a new connection; returns False above a limit."""
        if self._open >= self.settings.max_connections:
            REFUSED.labels("connections").inc()
            return False
        if self._by_address[address] >= self.settings.max_per_address:
            REFUSED.labels("address_connections").inc()
            return False
        self._by_address[address] += 1
        self._open += 1
        return True

    def remove(self, address: str) -> None:
        """Ends the count of an admitted connection."""
        self._open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class Connection(web.RequestHandler):
    """One connection. A header has to be complete within the deadline after the connection opens,
    and after the first byte of each later request; if that came with or during another request,
    after the end of that one. A client has to take bytes of an answer that is larger than the
    buffers."""

    __slots__ = (
        "_address",
        "_body",
        "_connections",
        "_deadline",
        "_header_begun",
        "_in_request",
        "_stall",
        "_unsent_bytes",
    )

    def __init__(
        self, server: web.Server, connections: Connections, loop: asyncio.AbstractEventLoop
    ) -> None:
        # None turns access logs off; aiohttp's annotation omits it.
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            lingering_time=min(LINGER_S, connections.settings.body_timeout_s),
        )
        self._connections = connections
        self._address: str | None = None
        """None unless the connection is admitted."""
        self._deadline: asyncio.TimerHandle | None = None
        self._in_request = False
        self._body: StreamReader = EMPTY_PAYLOAD
        """Of the newest header."""
        self._header_begun = False
        """Bytes of a further, incomplete header have come during a request."""
        self._stall: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        """In the buffer of the transport, at the last look."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins the first header, or refuses the connection."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        if not self._connections.admit(address):
            self.force_close()
            # uvloop's transports are no subclasses of asyncio's.
            cast(asyncio.Transport, transport).write(_REFUSAL)
            transport.close()
            return
        self._address = address
        own = transport.get_extra_info("socket")
        if own is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Bytes between two requests begin a header, and bytes after the body of one."""
        headers, between = self._request_count, self._body.is_eof()
        super().data_received(data)
        if self._request_count > headers:
            self._body = self._messages[-1][1]
            # A body has an end that is not seen here: a header behind it waits for its next byte.
            ends = self._body is not EMPTY_PAYLOAD or data.endswith(b"\r\n\r\n")
            self._header_begun = not ends
        elif between:
            self._header_begun = True
        if not self._in_request and self._deadline is None:
            self._start_deadline()

    def pause_writing(self) -> None:
        """The buffer is full: its request waits until the client reads."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop_stall()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the count."""
        self._stop_deadline()
        self._stop_stall()
        if self._address is not None:
            self._connections.remove(self._address)
            self._address = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Refuses a body in an encoding whose library this host lacks: its header is not read, so
        the error has OpenAI's format in every protocol."""
        if not isinstance(exc, ContentEncodingError):
            return super().handle_error(request, status, exc, message)
        failure = Failure.of(unsupported_encoding(exc.message.strip()))
        refusal = web.json_response(
            openai_error(failure), status=failure.status, headers=failure.headers
        )
        refusal.force_close()
        return refusal

    @contextmanager
    def request(self) -> Iterator[None]:
        """Handles one request, with a complete header, for the length of a block."""
        self._stop_deadline()
        self._in_request = True
        try:
            yield
        finally:
            self._in_request = False
            if self._header_begun and not self._messages and self._deadline is None:
                self._start_deadline()

    def _start_deadline(self) -> None:
        timeout_s = self._connections.settings.header_timeout_s
        self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._close_late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_late(self) -> None:
        REFUSED.labels("header_timeout").inc()
        self.force_close()

    def _await_reader(self) -> None:
        self._unsent_bytes = self._transport_of_answer().get_write_buffer_size()
        timeout_s = self._connections.settings.write_timeout_s
        self._stall = asyncio.get_running_loop().call_later(timeout_s, self._abort_stalled)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _abort_stalled(self) -> None:
        transport = self._transport_of_answer()
        # Nothing is added while writing is paused, so any progress makes it smaller.
        if transport.get_write_buffer_size() < self._unsent_bytes:
            self._await_reader()
            return
        REFUSED.labels("write_timeout").inc()
        # Its request ends like that of a client that has closed the connection.
        transport.abort()

    def _transport_of_answer(self) -> asyncio.Transport:
        # uvloop's transports are no subclasses of asyncio's.
        return cast(asyncio.Transport, self.transport)
