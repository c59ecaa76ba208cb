"""One HTTP port for all gateways of a host: a connection goes to the process of its session.

The kernel spreads connections over the processes (SO_REUSEPORT). The process that gets one peeks at
the header of its first request, and hands the socket to the owner of the session: of the processes
in discovery, the one that rendezvous hashing chooses. No byte is proxied. Each process also keeps a
port of its own, by which runners find it.

A connection stays where its first request belongs. Later requests of other sessions on it are
answered there too, as at any other gateway. A socket that cannot be handed over stays as well.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from forge.core.errors import ConfigError
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.bind_errors import bind_reason
from forge.runtime.telemetry import log
from services.gateway.http.listener.socket_handover import SocketHandover
from services.gateway.metrics import SHARED_CONNECTIONS

BACKLOG = 128
MAX_HEAD_BYTES = 16 << 10
"""A longer header is not read further: its connection stays."""
_END = b"\r\n\r\n"
_PAUSE_S = 0.5
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def port_of_host(port: int) -> str:
    """Returns the name of a port of this host, which no other host has."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{port}"


def owner_of(key: str, instance_ids: Collection[str]) -> str:
    """Returns the instance that owns a session."""

    def rank(instance_id: str) -> bytes:
        return hashlib.blake2b(f"{key}@{instance_id}".encode(), digest_size=8).digest()

    return max(instance_ids, key=rank)


class SharedPort:
    """The shared port of one process."""

    def __init__(
        self,
        instance_id: str,
        *,
        peers: Callable[[], Collection[str]],
        session_of: Callable[[bytes], str],
        header_timeout_s: float,
        most: int,
    ) -> None:
        """`peers`: the instances that share the port now. `session_of`: returns the session of a
        request by its header, "" if it names none. `most`: connections with an incomplete header;
        further ones stay in the kernel's queue."""
        self._instance_id = instance_id
        self._peers, self._session_of = peers, session_of
        self._header_timeout_s = header_timeout_s
        self._free = asyncio.Semaphore(most)
        self._protocol: Callable[[], asyncio.BaseProtocol] = asyncio.Protocol
        self._listener: socket.socket | None = None
        self._handover: SocketHandover | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self, host: str, port: int, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> int:
        """Listens, and returns the port; `protocol` makes a connection. Raises `ConfigError` if the
        port is in use."""
        self._protocol = protocol
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (host, port), family=family, backlog=BACKLOG, reuse_port=True
            )
        except OSError as error:
            raise ConfigError(
                f"http.shared_port = {port}: {host}:{port} cannot be bound: {bind_reason(error)}"
            ) from None
        self._listener.setblocking(False)
        bound: int = self._listener.getsockname()[1]
        self._handover = SocketHandover(
            port_of_host(bound), self._instance_id, on_socket=self._receive
        )
        self._keep(asyncio.create_task(self._accept(self._listener)))
        return bound

    async def stop(self) -> None:
        """Closes the port; taken connections stay open."""
        await cancel_and_wait(*self._tasks)
        if self._handover is not None:
            self._handover.close()
        if self._listener is not None:
            self._listener.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._free.release()
                full = error.errno in _NO_DESCRIPTORS
                if full:
                    log.warning("shared_port_accept_failed", error=error.strerror)
                # A turn of the loop in any case: an error may come back at once.
                await asyncio.sleep(_PAUSE_S if full else 0)
                continue
            except asyncio.CancelledError:
                self._free.release()
                raise
            placing = asyncio.create_task(self._place(connection))
            placing.add_done_callback(lambda _: self._free.release())
            self._keep(placing)

    async def _place(self, connection: socket.socket) -> None:
        """Hands a connection to the owner of its session, or takes it."""
        connection.setblocking(False)
        try:
            head = await self._head(connection)
            key = self._session_of(head) if head else ""
            owner = owner_of(key, {self._instance_id, *self._peers()}) if key else ""
            assert self._handover is not None, "started"
            if owner not in ("", self._instance_id) and self._handover.send(connection, owner):
                SHARED_CONNECTIONS.labels("handed_over").inc()
                return
            SHARED_CONNECTIONS.labels("kept" if key else "unknown").inc()
            await self._take(connection)
        except (TimeoutError, OSError):
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _head(self, connection: socket.socket) -> bytes:
        """Returns the header of the first request, which stays in the socket, as far as it came.
        Raises `TimeoutError` above the deadline."""
        head = b""
        async with asyncio.timeout(self._header_timeout_s):
            while True:
                await _readable(connection)
                seen = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
                # The same bytes again: the peer has ended its side.
                if _END in seen or len(seen) in (len(head), MAX_HEAD_BYTES):
                    break
                head = seen
                # Readable once there is more than that, so that a slow header costs nothing.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(head) + 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return seen

    def _receive(self, connection: socket.socket) -> None:
        SHARED_CONNECTIONS.labels("received").inc()
        connection.setblocking(False)
        self._keep(asyncio.create_task(self._take_received(connection)))

    async def _take_received(self, connection: socket.socket) -> None:
        with suppress(OSError):
            await self._take(connection)

    async def _take(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(self._protocol, connection)


async def _readable(connection: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection.fileno())
