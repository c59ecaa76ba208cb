"""The listener of /metrics, on a thread: it answers while the event loop is busy.

It has no tokens: off loopback its clients need a certificate, as those of the gRPC server do. A
connection has a thread of its own, up to `MOST_CONNECTIONS`; one more ends the oldest, so silent
clients keep no scraper out.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from forge.core.errors import ConfigError
from forge.runtime.rpc.bind_errors import bind_fault
from forge.runtime.security.tls import Tls
from forge.runtime.telemetry import log

MOST_CONNECTIONS = 16


def serve_metrics(host: str, port: int, tls: Tls) -> int:
    """Serve /metrics; return the port. Raises ConfigError, also where TLS is needed but not set."""
    if tls.connection_context() is None:
        tls.require_plain_allowed(host)
    try:
        listener = _Listener(host, port, tls)
    except OSError as error:
        raise ConfigError(
            f"metrics_port = {port}: {host}:{port} cannot be bound: "
            f"{bind_fault(error, '--metrics-port')}"
        ) from None
    listener.set_app(make_wsgi_app())
    Thread(target=listener.serve_forever, name="metrics", daemon=True).start()
    return int(listener.server_port)


class _Handler(WSGIRequestHandler):
    timeout = 10
    """Deadline in seconds of the handshake and of the request, each."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Listener(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, tls: Tls) -> None:
        self._tls = tls
        self._free = BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = Lock()
        self._open: dict[Any, None] = {}
        """Connections with a thread, the oldest first."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if (context := self._tls.connection_context()) is not None:
            # The handshake is on the connection's thread: a silent client delays no other.
            connection = context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._end_oldest()
            self._free.acquire()
        with self._lock:
            self._open[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _end_oldest(self) -> None:
        """Shut the oldest connection down: its thread reads the end of it and ends."""
        with self._lock, suppress(OSError):
            # Not the method of a TLS socket, which its own thread uses.
            socket.socket.shutdown(next(iter(self._open)), socket.SHUT_RDWR)

    def _ended(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics_connection_failed", error=repr(sys.exception()))
