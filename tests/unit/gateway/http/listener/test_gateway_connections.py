"""Limits on HTTP connections, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from services.gateway.config import ConnectionSettings, TenantSettings
from services.gateway.http.listener.connections import Connection, Connections
from services.gateway.turns.types import Piece, Turn
from tests.support.gateway.limits import EdgeLimits, edge_limits
from tests.support.gateway.scripted_turns import ScriptedTurns, served
from tests.support.runtime.waiting import until

HALF_OPEN = 300
HALF_HEADER = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nX-Slow: "
TIMEOUT_S = 60.0
BODY = {"model": "chatml-test", "stream": True, "messages": [{"role": "user", "content": "hi"}]}

Socket = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PausedTurns(ScriptedTurns):
    """Its answers end when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.script = ("one", "two")
        self.may_end = asyncio.Event()

    async def run_turn(self, session: Any, request: Any) -> AsyncGenerator[Piece | Turn]:
        async for event in super().run_turn(session, request):
            yield event
            await self.may_end.wait()


def refused(limit: str) -> float:
    return REGISTRY.get_sample_value("forge_gateway_refused_total", {"limit": limit}) or 0.0


def gauge(name: str) -> float | None:
    value: float | None = REGISTRY.get_sample_value(name)
    return value


async def connect(url: str, sent: bytes = b"") -> Socket:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


async def received(reader: asyncio.StreamReader) -> bytes:
    """Returns all bytes up to the close by the gateway; none for a close without an answer."""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            # The gateway closed with bytes of ours unread.
            return b""


async def answered(url: str, sent: bytes) -> bytes:
    """Returns all bytes of a connection of its own."""
    reader, writer = await connect(url, sent)
    answer = await received(reader)
    writer.close()
    return answer


async def test_half_open_connections_close_while_a_stream_continues() -> None:
    """A connection with unfinished headers is closed at the deadline; a streamed answer takes
    longer."""
    turns, before = PausedTurns(), refused("header_timeout")
    limits = ConnectionSettings(header_timeout_s=1.0)
    async with served(turns, connections=limits) as url, aiohttp.ClientSession() as client:
        half_open = [await connect(url, HALF_HEADER) for _ in range(HALF_OPEN)]
        key = {"Authorization": "Bearer k"}
        async with client.post(f"{url}/v1/chat/completions", json=BODY, headers=key) as answer:
            first = await answer.content.readline()
            assert [await received(reader) for reader, _ in half_open] == [b""] * HALF_OPEN
            turns.may_end.set()
            rest = await answer.content.read()
        for _, writer in half_open:
            writer.close()
    assert b"data:" in first and rest.endswith(b"data: [DONE]\n\n")
    assert refused("header_timeout") - before == HALF_OPEN


@pytest.mark.parametrize("together", [True, False])
async def test_deadline_holds_for_a_header_that_began_during_a_request(together: bool) -> None:
    """No later byte has to come: half a header with the request before it, or behind its body."""
    limits = ConnectionSettings(header_timeout_s=0.5)
    turns, body = PausedTurns(), json.dumps(BODY).encode()
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer k\r\n"
    first = begin + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if together:
        first = b"GET /healthz HTTP/1.1\r\nHost: g\r\n\r\n" + HALF_HEADER
    async with served(turns, connections=limits) as url:
        reader, writer = await connect(url, first)
        if not together:
            await reader.readuntil(b"data:")
            writer.write(HALF_HEADER)
            await writer.drain()
            turns.may_end.set()
        await received(reader)
        writer.close()


async def test_deadline_holds_for_each_header_of_a_connection() -> None:
    """A complete first request does not exempt the second header."""
    limits = ConnectionSettings(header_timeout_s=0.5)
    async with served(ScriptedTurns(), connections=limits) as url:
        reader, writer = await connect(url, b"GET /healthz HTTP/1.1\r\nHost: g\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(HALF_HEADER)
        assert await received(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("chat/completions", b'"invalid_request_error"'), ("messages", b'"timeout_error"')],
)
async def test_late_body_gets_408(path: str, kind: bytes) -> None:
    """A body that stops gets 408 in the form of the protocol, and the connection closes."""
    before = refused("body_timeout")
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: g\r\nx-api-key: k\r\nContent-Length: 99\r\n\r\n"
    async with served(ScriptedTurns(), connections=ConnectionSettings(body_timeout_s=0.2)) as url:
        reader, writer = await connect(url, head.encode() + b'{"model"')
        answer = await received(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ") and kind in answer
    assert refused("body_timeout") - before == 1


class EndedTurns(ScriptedTurns):
    """Says when its answer ends, complete or not. The answer does not fit into any buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.script = ["x" * 65_536] * 512
        self.ended = asyncio.Event()
        self.given = 0
        """Pieces that the answer has taken."""

    async def run_turn(self, session: Any, request: Any) -> AsyncGenerator[Piece | Turn]:
        try:
            async for event in super().run_turn(session, request):
                yield event
                self.given += 1
        finally:
            self.ended.set()


async def streaming(url: str) -> Socket:
    """Begins a streamed answer and reads nothing."""
    return await connect(url, stream_request())


def stream_request() -> bytes:
    body = json.dumps(BODY).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nx-api-key: k\r\n"
    return head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


async def test_client_that_never_reads_loses_its_connection() -> None:
    """The call ends as if the client had closed, so its slot is free; another call is not
    affected."""
    before, turns = refused("write_timeout"), EndedTurns()
    async with served(turns, connections=ConnectionSettings(write_timeout_s=1.0)) as url:
        _, writer = await streaming(url)
        assert (await answered(url, b"GET /healthz HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.0 200")
        async with asyncio.timeout(TIMEOUT_S):
            await turns.ended.wait()
        await until(lambda: not gauge("forge_gateway_connections"))
        writer.close()
    assert refused("write_timeout") - before == 1


async def test_unread_answer_takes_a_bounded_part_of_memory() -> None:
    """Buffers of the kernel included: an answer of 32 MiB waits where it is made."""
    turns = EndedTurns()
    turns.script = ["x" * 4096] * 8192
    async with served(turns, connections=ConnectionSettings(write_timeout_s=0.5)) as url:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = url.removeprefix("http://").partition(":")
        client.connect((host, int(port)))
        client.sendall(stream_request())
        async with asyncio.timeout(TIMEOUT_S):
            await turns.ended.wait()
        client.close()
    assert 0 < turns.given < 128


async def unused(request: web.BaseRequest) -> web.StreamResponse:
    raise NotImplementedError


async def test_client_that_stops_to_send_has_left() -> None:
    """A half-closed connection looks like a closed one: its call ends, and so does its stream."""
    turns = EndedTurns()
    async with served(turns) as url:
        reader, writer = await streaming(url)
        await reader.readuntil(b"data:")
        writer.write_eof()
        assert b"[DONE]" not in await received(reader)
        await asyncio.wait_for(turns.ended.wait(), TIMEOUT_S)
        writer.close()


async def test_slow_client_keeps_its_connection() -> None:
    """It has taken some bytes at each deadline; one deadline without any ends the connection."""
    before, waiting = refused("write_timeout"), iter([900, 800, 800, 700, 700, 700])
    server, connections = web.Server(unused), Connections(ConnectionSettings())
    connection = Connection(server, connections, asyncio.get_running_loop())
    transport = Mock(get_write_buffer_size=lambda: next(waiting))
    connection.transport = transport
    connection.pause_writing()
    for aborted in (False, False, True):
        assert connection._stall is not None
        connection._abort_stalled()
        assert transport.abort.called is aborted
    connection.connection_lost(None)
    assert refused("write_timeout") - before == 1


async def test_2200_half_sent_requests_are_closed() -> None:
    """Half of them in the header, half in the body; the counts of connections and bodies end."""
    head = b"POST /v1/messages HTTP/1.1\r\nHost: g\r\nx-api-key: k\r\nContent-Length: 99\r\n\r\n"
    settings = ConnectionSettings(header_timeout_s=2.0, body_timeout_s=2.0)
    async with served(ScriptedTurns(), connections=settings) as url:
        sockets = [await connect(url, HALF_HEADER) for _ in range(1100)]
        sockets += [await connect(url, head + b'{"model"') for _ in range(1100)]
        answers = await asyncio.gather(*(received(reader) for reader, _ in sockets))
        for _, writer in sockets:
            writer.close()
        assert answers[:1100] == [b""] * 1100
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers[1100:])
        await until(lambda: not gauge("forge_gateway_connections"))
        assert not gauge("forge_gateway_body_bytes")


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (partial(edge_limits, most_bytes=64), "bodies"),
        (partial(edge_limits, most_of_session_bytes=64), "session_bodies"),
    ],
)
async def test_bodies_in_memory_are_limited(limits: Callable[[], EdgeLimits], limit: str) -> None:
    """Half-sent bodies count by their bytes; above the limit another gets 429 with a hint, and the
    end of the first makes room."""
    before, turns = refused(limit), ScriptedTurns()
    body = b'{"model":"chatml-test","messages":[]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nx-api-key: k\r\n"
    half = head + b"Content-Length: 1000\r\n\r\n" + b" " * 50
    chunked = head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunked += b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with served(turns, limits=limits()) as url:
        _, writer = await connect(url, half)
        await until(lambda: gauge("forge_gateway_body_bytes") == 50)
        answer = await answered(url, chunked)
        assert answer.startswith(b"HTTP/1.1 429 ") and b"Retry-After: 1\r\n" in answer
        writer.close()
        await until(lambda: not gauge("forge_gateway_body_bytes"))
        answer = await answered(url, chunked)
        assert answer.startswith(b"HTTP/1.1 200 ")
    assert refused(limit) - before == 1


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_large_request_of_a_tenant_gets_413(path: str) -> None:
    """By its length before its body is read, or by the body itself."""
    limits = edge_limits(TenantSettings(max_request_mib=0.001))
    headers = {"x-api-key": "k"}
    async with served(ScriptedTurns(), limits=limits) as url, aiohttp.ClientSession() as client:
        for body in (b" " * 2000, chunks()):
            async with client.post(f"{url}/v1/{path}", data=body, headers=headers) as answer:
                assert answer.status == 413, await answer.text()


async def chunks() -> AsyncGenerator[bytes]:
    for _ in range(4):
        yield b" " * 500


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (ConnectionSettings(max_connections=2), "connections"),
        (ConnectionSettings(max_per_address=2), "address_connections"),
    ],
)
async def test_connections_above_a_limit_get_503(limits: ConnectionSettings, limit: str) -> None:
    """The third connection is refused; the end of one makes room."""
    before = refused(limit)
    async with served(ScriptedTurns(), connections=limits) as url:
        _, writer = await connect(url)
        second, other = await connect(url, b"GET /healthz HTTP/1.1\r\nHost: g\r\n\r\n")
        await second.readuntil(b"}")
        third, refused_writer = await connect(url)
        assert (await received(third)).startswith(b"HTTP/1.1 503 ")
        # The gateway closes this one itself, so its count has ended at the end of the bytes.
        other.write(b"GET /healthz HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
        await received(second)
        fourth, last = await connect(url, b"GET /healthz HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (await fourth.readline()) == b"HTTP/1.1 200 OK\r\n"
        for one in (writer, other, refused_writer, last):
            one.close()
    assert refused(limit) - before == 1
