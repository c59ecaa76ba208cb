"""The bulk port: who gets data there, and what others cost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import structlog

from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.weights.bulk import BulkError, BulkServer, BulkStream, connection, server
from forge.runtime.weights.bulk.connection import ACCEPTED, TICKET_BYTES
from tests.support.runtime.waiting import until

SECURITY = Security(Keyring.from_bytes(b"k" * 32), subject="test")
DATA = memoryview(bytes(range(256)) * 4096)


@pytest_asyncio.fixture
async def port() -> AsyncIterator[BulkServer]:
    started = BulkServer(SECURITY, BulkSettings(), host="127.0.0.1", wait_s=60.0)
    yield started
    started.close()


def offered(at: BulkServer) -> BulkStream:
    stream = at.stream()
    assert stream is not None
    return stream


def open_to(stream: BulkStream) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stream.offer.port), timeout=60)


async def answer_to(stream: BulkStream, said: bytes) -> bytes:
    """All bytes that come back for these, and the end of the connection."""

    def talk() -> bytes:
        found = b""
        with open_to(stream) as sock:
            sock.sendall(said)
            try:
                while piece := sock.recv(4096):
                    found += piece
            except ConnectionResetError:
                pass
        return found

    return await asyncio.to_thread(talk)


async def test_data_goes_to_the_holder_of_the_ticket(port: BulkServer) -> None:
    """After one byte that accepts it."""
    async with offered(port) as stream:
        answer = asyncio.create_task(answer_to(stream, stream.offer.ticket))
        assert await stream.connected()
        await stream.send([DATA, DATA[:3]])
        await stream.__aexit__(None, None, None)
        assert await answer == ACCEPTED + bytes(DATA) + bytes(DATA[:3])


@pytest.mark.parametrize(
    "said", [bytes(TICKET_BYTES), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 4, b"\x16\x03\x01" * 99]
)
async def test_wrong_ticket_gets_no_byte(port: BulkServer, said: bytes) -> None:
    """Nor do bytes of another protocol; the waiting call stays."""
    async with offered(port) as stream:
        assert await answer_to(stream, said) == b""
        answer = asyncio.create_task(answer_to(stream, stream.offer.ticket))
        assert await stream.connected()
        await stream.__aexit__(None, None, None)
        assert await answer == ACCEPTED


async def test_ticket_is_valid_once_and_for_its_call(port: BulkServer) -> None:
    """A second connection with it, and one after the call, get no byte."""
    async with offered(port) as stream:
        with open_to(stream) as first:
            first.sendall(stream.offer.ticket)
            assert await stream.connected()
            assert await answer_to(stream, stream.offer.ticket) == b""
    assert await answer_to(stream, stream.offer.ticket) == b""


async def test_silent_connections_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ones are closed at once; calls have their turn when the silent ones have ended."""
    monkeypatch.setattr(server, "MOST_UNKNOWN", 3)
    at = BulkServer(SECURITY, BulkSettings(), host="127.0.0.1", wait_s=0.5)
    async with offered(at) as stream:
        silent = [open_to(stream) for _ in range(3)]
        await until(lambda: at._unknown == 3)
        assert await answer_to(stream, b"") == b""
        for one in silent:
            assert await asyncio.to_thread(one.recv, 1) == b""
            one.close()
        await until(lambda: at._unknown == 0)
    async with offered(at) as stream:
        with open_to(stream) as sock:
            sock.sendall(stream.offer.ticket)
            assert await stream.connected()
    at.close()


async def test_streams_are_bounded(port: BulkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further calls send over gRPC until one ends."""
    monkeypatch.setattr(server, "MOST_STREAMS", 1)
    async with offered(port):
        assert port.stream() is None
    assert port.stream() is not None


async def test_caller_that_reads_nothing_is_left(
    port: BulkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a time for each slice; other calls continue meanwhile."""
    monkeypatch.setattr(connection, "SEND_S", 0.5)
    async with offered(port) as slow, offered(port) as fast:
        with open_to(slow) as sock:
            sock.sendall(slow.offer.ticket)
            assert await slow.connected()
            stuck = asyncio.create_task(slow.send([DATA] * 64))
            answer = asyncio.create_task(answer_to(fast, fast.offer.ticket))
            assert await fast.connected()
            await fast.send([DATA])
            await fast.__aexit__(None, None, None)
            assert len(await answer) == len(DATA) + 1
            with pytest.raises(BulkError, match="timed out"):
                await stuck


async def test_cancelled_call_ends_its_send(port: BulkServer) -> None:
    """No thread stays with a caller that reads nothing."""
    async with offered(port) as stream:
        with open_to(stream) as sock:
            sock.sendall(stream.offer.ticket)
            assert await stream.connected()
            stuck = asyncio.create_task(stream.send([DATA] * 64))
            await asyncio.sleep(0)
            stuck.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stuck
            await stream.__aexit__(None, None, None)
    assert not port._streams


async def test_end_of_the_server_ends_its_streams() -> None:
    """So the stop of a process waits for no caller."""
    at = BulkServer(SECURITY, BulkSettings(), host="127.0.0.1", wait_s=60.0)
    async with offered(at) as stream:
        with open_to(stream) as sock:
            sock.sendall(stream.offer.ticket)
            assert await stream.connected()
            stuck = asyncio.create_task(stream.send([DATA] * 64))
            await asyncio.sleep(0)
            at.close()
            with pytest.raises(BulkError):
                await stuck
    assert at.stream() is None


async def test_plain_tcp_is_offered_on_loopback_alone() -> None:
    """As gRPC: beyond it TLS is needed, or `insecure`."""
    with structlog.testing.capture_logs() as logs:
        assert BulkServer(SECURITY, BulkSettings(), host="0.0.0.0").stream() is None
    assert "TLS is needed" in logs[0]["error"]
    trusted = Security(Keyring.from_bytes(b"k" * 32), insecure=True)
    at = BulkServer(trusted, BulkSettings(), host="0.0.0.0")
    async with offered(at):
        at.close()


async def test_ranks_of_a_host_have_ports_in_a_row() -> None:
    """The setting is the port of the first one; a taken one leaves that rank to gRPC."""
    first = BulkServer(SECURITY, BulkSettings(), host="127.0.0.1")
    async with offered(first) as stream:
        taken = BulkSettings(port=stream.offer.port - 1)
        with structlog.testing.capture_logs() as logs:
            assert BulkServer(SECURITY, taken, host="127.0.0.1", rank=1).stream() is None
        assert logs[0]["event"] == "weight_bulk_not_offered"
    first.close()
