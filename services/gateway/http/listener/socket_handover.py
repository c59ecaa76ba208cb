"""Open sockets that the gateways of a host hand to each other.

Owns the Unix sockets between them, in the abstract namespace: no file is left, and a name ends with
its process. Only processes of the same user are heard. Owns no choice of a process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

_ONE = b"+"
_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")


class SocketHandover:
    """The sockets that one process receives, and those that it hands over."""

    def __init__(self, host: str, instance_id: str, *, on_socket: Callable[[socket.socket], None]):
        """`host`: the name of what the processes share. `on_socket` owns each received socket."""
        self._host, self._on_socket = host, on_socket
        self._to: dict[str, socket.socket] = {}
        """Sockets to other processes, by instance."""
        self._from: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(self._name(instance_id))
        self._listener.listen(_BACKLOG)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Ends the Unix sockets; received sockets stay open."""
        loop = asyncio.get_running_loop()
        for heard in (self._listener, *self._from):
            loop.remove_reader(heard.fileno())
        for opened in (self._listener, *self._from, *self._to.values()):
            opened.close()

    def send(self, connection: socket.socket, instance_id: str) -> bool:
        """Hands a socket over and closes it here; returns False if the process does not take it."""
        # A process that has restarted under its name has another socket.
        for fresh in (False, True):
            if fresh and (old := self._to.pop(instance_id, None)) is not None:
                old.close()
            try:
                to = self._to.get(instance_id) or self._connect(instance_id)
                socket.send_fds(to, [_ONE], [connection.fileno()])
            except BlockingIOError:
                return False
            except OSError:
                continue
            connection.close()
            return True
        return False

    def _connect(self, instance_id: str) -> socket.socket:
        to = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            to.connect(self._name(instance_id))
        except OSError:
            to.close()
            raise
        self._to[instance_id] = to
        return to

    def _name(self, instance_id: str) -> str:
        digest = hashlib.blake2b(f"{self._host}/{instance_id}".encode(), digest_size=16)
        return f"\0forge-gateway-{digest.hexdigest()}"

    def _accept(self) -> None:
        with suppress(OSError):
            heard, _ = self._listener.accept()
            size = _CREDENTIALS.size
            _, uid, _ = _CREDENTIALS.unpack(
                heard.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )
            if uid != os.getuid():
                heard.close()
                return
            heard.setblocking(False)
            self._from.add(heard)
            asyncio.get_running_loop().add_reader(heard.fileno(), self._receive, heard)

    def _receive(self, heard: socket.socket) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(heard, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        for descriptor in descriptors:
            self._on_socket(socket.socket(fileno=descriptor))
        if not message:
            asyncio.get_running_loop().remove_reader(heard.fileno())
            self._from.discard(heard)
            heard.close()
