"""The shared port's parts: sockets between processes, and headers that do not come."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest

from services.gateway.http.listener.shared_port import SharedPort, owner_of
from services.gateway.http.listener.socket_handover import SocketHandover
from tests.support.runtime.waiting import until


def pair_of() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


async def test_socket_reaches_the_process_of_a_name() -> None:
    """Also after a restart under the same name; for an unknown name it stays open."""
    host, received = uuid.uuid4().hex, list[socket.socket]()
    here = SocketHandover(host, "here", on_socket=received.append)
    for _ in range(2):
        there = SocketHandover(host, "there", on_socket=received.append)
        ours, theirs = pair_of()
        assert here.send(theirs, "there")
        assert theirs.fileno() == -1
        await until(lambda: received)
        ours.send(b"x")
        assert received.pop().recv(1) == b"x"
        there.close()
    ours, theirs = pair_of()
    assert not here.send(theirs, "nobody")
    ours.send(b"y")
    assert theirs.recv(1) == b"y"
    here.close()


async def test_process_of_another_user_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed, and the socket it sends is dropped."""
    host, received = uuid.uuid4().hex, list[socket.socket]()
    here = SocketHandover(host, "here", on_socket=received.append)
    there = SocketHandover(host, "there", on_socket=received.append)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    ours, theirs = pair_of()
    here.send(theirs, "there")
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    assert await asyncio.wait_for(loop.sock_recv(ours, 1), 60) == b""
    assert not received
    here.close()
    there.close()


def test_each_instance_owns_sessions_and_keeps_them_when_others_leave() -> None:
    """Rendezvous hashing: only sessions of an instance that left move."""
    keys = [f"t{number}:0:0" for number in range(300)]
    owners = {key: owner_of(key, ["a", "b", "c"]) for key in keys}
    assert min(Counter(owners.values()).values()) > 60
    for key, owner in owners.items():
        if owner != "c":
            assert owner_of(key, ["b", "a"]) == owner


class Echo(asyncio.Protocol):
    """Answers with the first bytes that it gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@asynccontextmanager
async def shared(*, header_timeout_s: float, most: int = 8) -> AsyncIterator[int]:
    port = SharedPort(
        uuid.uuid4().hex,
        peers=lambda: (),
        session_of=lambda head: "",
        header_timeout_s=header_timeout_s,
        most=most,
    )
    try:
        yield await port.start("127.0.0.1", 0, Echo)
    finally:
        await port.stop()


async def test_header_in_pieces_is_taken_whole_and_a_late_one_is_closed() -> None:
    """No byte is lost; a peer that ends its side early is taken too, for its error."""
    async with shared(header_timeout_s=60.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in (b"GET / HT", b"TP/1.1\r\n", b"\r\nbody"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        assert await reader.readexactly(22) == b"GET / HTTP/1.1\r\n\r\nbody"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET")
        writer.write_eof()
        assert await reader.readexactly(3) == b"GET"
        writer.close()
    async with shared(header_timeout_s=0.05, most=1) as port:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HT")
            with suppress(ConnectionResetError):  # Its bytes were not read.
                assert await reader.read() == b""
            writer.close()
