"""Limits of a gRPC server on connections, streams, handshakes and pings, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from forge.runtime.rpc import RpcServer
from forge.runtime.rpc.channel import CHANNEL_OPTIONS
from forge.runtime.rpc.server import ConnectionLimits
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from tests.support.runtime.echo import FULL_NAME, SCOPES, EchoServicer, EchoStub, add_to_server
from tests.support.runtime.waiting import until

SECURITY = Security(Keyring.from_bytes(b"k" * 32), subject="tester")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""With empty settings."""
PING_HEAD = b"\0\0\x08\x06\0\0\0\0\0"
TIMEOUT_S = 60.0
OPTIONS = dict(CHANNEL_OPTIONS)


@asynccontextmanager
async def served(**limits: int) -> AsyncIterator[str]:
    """The address of an echo server."""
    server = RpcServer(
        service="echo",
        host="127.0.0.1",
        port=0,
        security=SECURITY,
        limits=ConnectionLimits(**limits),
    )
    server.add_service(add_to_server, EchoServicer(), full_name=FULL_NAME, scopes=SCOPES)
    yield await server.start()
    await server.stop(grace_s=0)


async def connect(address: str, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


async def received(reader: asyncio.StreamReader) -> bytes:
    """All bytes up to the close by the server."""
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.read()


@asynccontextmanager
async def echo(address: str, **options: Any) -> AsyncIterator[EchoStub]:
    """A stub over one channel with Forge's options."""
    merged = OPTIONS | {name.replace("__", "."): value for name, value in options.items()}
    async with grpc.aio.insecure_channel(address, options=[*merged.items()]) as channel:
        yield EchoStub(channel)


def credentials() -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {SECURITY.token_for('Echo')}"),)


async def test_a_client_that_pings_without_pause_is_cut_off() -> None:
    """After `ping_strikes` early pings the server says too_many_pings and closes."""
    async with served() as address:
        reader, writer = await connect(address, PREFACE + (PING_HEAD + b"12345678") * 9)
        assert (await received(reader)).endswith(b"too_many_pings")
        writer.close()


class Proxy:
    """Passes one connection on and counts the pings of its client."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.pings = 0
        self.connections = 0

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await connect(self._address, b"")
        await asyncio.gather(
            self._pass_on(reader, far_writer, count=True),
            self._pass_on(far_reader, writer, count=False),
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool
    ) -> None:
        while data := await reader.read(1 << 16):
            self.pings += data.count(PING_HEAD) if count else 0
            writer.write(data)
        writer.close()


async def test_forges_own_clients_are_not_cut_off() -> None:
    """A call without data outlasts more pings than strikes, at the proportion of
    `CHANNEL_OPTIONS` to the server's interval, twenty times faster: gRPC pings once a second at
    most."""
    interval_ms = ConnectionLimits().ping_interval_ms // 20
    keepalive_ms = OPTIONS["grpc.keepalive_time_ms"] // 20
    async with served(ping_interval_ms=interval_ms, ping_strikes=1) as address:
        proxy = Proxy(address)
        async with (
            proxy.listen() as passed,
            echo(passed, grpc__keepalive_time_ms=keepalive_ms) as stub,
        ):
            call = stub.StreamStream(metadata=credentials())
            await until(lambda: proxy.pings > 3)
            await call.write(b"say:still here")
            assert await call.read() == b"still here"
            await call.done_writing()
    assert proxy.connections == 1


async def test_connections_above_the_limit_are_closed() -> None:
    """The others go on, and the end of one makes room."""
    async with served(connections=2) as address:
        async with echo(address) as stub:
            assert await stub.Unary(b"say:one", metadata=credentials()) == b"one"
            first, writer = await connect(address, PREFACE)
            assert await first.readexactly(9)
            second, other = await connect(address, PREFACE)
            assert await received(second) == b""
            assert await stub.Unary(b"say:two", metadata=credentials()) == b"two"
            writer.close()
            other.close()
        async with echo(address) as stub:

            async def answered() -> bool:
                try:
                    return bool(await stub.Unary(b"say:three", metadata=credentials()) == b"three")
                except grpc.aio.AioRpcError:
                    return False

            await until(answered)


async def test_half_open_connections_are_closed() -> None:
    """A connection that never sends its settings ends at the deadline; a call goes on."""
    async with served(handshake_ms=300) as address, echo(address) as stub:
        assert await stub.Unary(b"say:one", metadata=credentials()) == b"one"
        sockets = [await connect(address, PREFACE[: 3 * at]) for at in range(8)]
        for reader, writer in sockets:
            await received(reader)
            writer.close()
        assert await stub.Unary(b"say:two", metadata=credentials()) == b"two"


async def test_streams_of_one_connection_are_limited() -> None:
    """A call above the limit waits at its client until another ends."""
    async with served(streams=1) as address, echo(address) as stub:
        first = stub.StreamStream(metadata=credentials())
        await first.write(b"say:one")
        assert await first.read() == b"one"
        second = stub.Unary(b"say:two", metadata=credentials())
        await first.write(b"say:three")
        assert await first.read() == b"three"
        assert not second.done()
        await first.done_writing()
        assert await first.read() == grpc.aio.EOF
        assert await second == b"two"
