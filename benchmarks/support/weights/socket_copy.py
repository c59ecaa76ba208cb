"""A copy of bytes over a plain socket, or over one with TLS, between two processes."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

_PIECE_BYTES = 1 << 20


def send_bytes(pipe: Connection, total_bytes: int, tls: str = "") -> None:
    """Send bytes over a new connection for each order; the first message is the port. `tls`: a
    folder of `Certificates`."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls)
    data = memoryview(np.random.default_rng(0).bytes(total_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        with suppress(EOFError):
            while True:
                pipe.recv()
                connection, _ = listener.accept()
                if context is not None:
                    connection = context.wrap_socket(connection, server_side=True)
                with connection:
                    for start in range(0, total_bytes, _PIECE_BYTES):
                        connection.sendall(data[start : start + _PIECE_BYTES])
                pipe.send(None)


def receive_bytes(pipe: Connection, port: int, total_bytes: int, tls: str = "") -> None:
    """Receive the bytes into new memory for each order, and keep them until the next."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, tls)
    pipe.send("ready")
    kept: list[bytearray] = []
    with suppress(EOFError):
        while True:
            pipe.recv()
            kept = [*kept[-1:], bytearray(total_bytes)]
            view, got = memoryview(kept[-1]), 0
            connection = socket.create_connection(("127.0.0.1", port))
            if context is not None:
                connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
            with connection:
                while got < total_bytes:
                    got += connection.recv_into(view[got : got + _PIECE_BYTES])
            pipe.send(None)


def _context(protocol: int, tls: str) -> ssl.SSLContext | None:
    """As gRPC: both ends show certificates of one authority."""
    if not tls:
        return None
    context = ssl.SSLContext(protocol)
    context.load_verify_locations(f"{tls}/ca.pem")
    context.load_cert_chain(f"{tls}/cert.pem", f"{tls}/key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context
