"""Bulk connections that fail: the rest arrives over gRPC, or from the next source."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import structlog

from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.runtime.weights.bulk import BulkServer, BulkStream
from tests.support.inference.bulk_sources import BulkSource, Send, bulk_source, halting, sliced
from tests.support.inference.weight_sources import Worker
from tests.support.runtime.etcd import Certificates

MIB = 1 << 20
WEIGHTS = {"a": Random(0).randbytes(3 * MIB), "b": b"tail"}
KEYRING = Keyring.from_bytes(b"k" * 32)


async def fetch_from(
    worker: Worker, address: str, *, peers: Sequence[str] = ()
) -> list[dict[str, object]]:
    """Fetch version 1 from the peers, then the trainer; returns the log."""
    worker.show(peers, version=1)
    with structlog.testing.capture_logs() as logs:
        worker.publish(1, WEIGHTS, source=address)
        assert await worker.until_serving(1) == WEIGHTS
    await worker.stop()
    return [dict(line) for line in logs]


def ways(logs: list[dict[str, object]]) -> list[object]:
    return [line["way"] for line in logs if line["event"] == "weights_swapped"]


def failed(logs: list[dict[str, object]]) -> list[str]:
    return [str(line["error"]) for line in logs if line["event"] == "weight_bulk_failed"]


async def test_damaged_slice_is_refused_and_arrives_over_grpc() -> None:
    """Its digest is that of the manifest; the slices before it stay."""
    left = [1]

    async def damage(send: Send, data: Sequence[memoryview]) -> None:
        for one in sliced(data):
            if left[0]:
                left[0] -= 1
                await send([one])
                continue
            wrong = bytearray(one)
            wrong[-1] ^= 1
            await send([memoryview(wrong)])

    async with bulk_source(WEIGHTS, hook=damage) as (source, address):
        logs = await fetch_from(Worker(silence_s=60.0), address)
    assert [request.bulk for request in source.requests] == [True, False]
    assert source.requests[1].from_byte == MIB
    (error,) = failed(logs)
    assert error.startswith("weights 1: slice 1 of a is damaged")


async def test_damaged_tensor_of_one_message_keeps_those_before_it() -> None:
    """Tensors below 4 MiB share a message; the rest follows from the damaged one on."""
    weights = {name: Random(name).randbytes(MIB // 2) for name in "abcd"}

    async def damage(send: Send, data: Sequence[memoryview]) -> None:
        wrong = bytearray(data[2])
        wrong[0] ^= 1
        await send([*data[:2], memoryview(wrong), *data[3:]])

    async with bulk_source(weights, hook=damage) as (source, address):
        worker = Worker(silence_s=60.0)
        with structlog.testing.capture_logs() as logs:
            worker.publish(1, weights, source=address)
            assert await worker.until_serving(1) == weights
        await worker.stop()
    assert [request.from_tensor for request in source.requests] == [0, 2]
    assert [request.from_byte for request in source.requests] == [0, 0]
    (error,) = failed([dict(line) for line in logs])
    assert error.startswith("weights 1: slice 0 of c is damaged")


async def test_connection_that_ends_between_tensors_of_a_message_keeps_them() -> None:
    """The next call begins with the tensor that was cut."""
    weights = {name: Random(name).randbytes(MIB // 2) for name in "abcd"}

    async def cut(send: Send, data: Sequence[memoryview]) -> None:
        await send([*data[:3], data[3][:100]])
        raise ConnectionResetError("cut")

    async with bulk_source(weights, hook=cut) as (source, address):
        worker = Worker(silence_s=60.0)
        worker.publish(1, weights, source=address)
        assert await worker.until_serving(1) == weights
        await worker.stop()
    assert [request.from_tensor for request in source.requests] == [0, 3]


async def test_damaged_delta_leaves_the_bulk_connection_in_use() -> None:
    """It travelled in the call: the same source sends the whole tensor over TCP."""
    changed = {"a": WEIGHTS["a"][:-1] + b"\0", "b": WEIGHTS["b"]}
    async with bulk_source(WEIGHTS) as (source, address):
        worker = Worker(silence_s=60.0)
        worker.publish(1, WEIGHTS, source=address)
        assert await worker.until_serving(1) == WEIGHTS
        source.hold(2, changed)
        # Its deltas are against other data than the worker has.
        source.hold(1, {"a": bytes([1]) + WEIGHTS["a"][1:], "b": WEIGHTS["b"]})
        with structlog.testing.capture_logs() as logs:
            worker.publish(2, changed, source=address)
            assert await worker.until_serving(2) == changed
        await worker.stop()
    given_up = [line for line in logs if line["event"] == "weight_source_given_up"]
    assert "a: the delta gives data with another digest" in given_up[0]["error"]
    assert [request.bulk for request in source.requests] == [True, True, True]
    assert [request.base_version for request in source.requests] == [0, 1, 0]
    assert not failed([dict(line) for line in logs])


async def test_hung_connection_is_left_after_the_silence() -> None:
    """Within a slice; the next source continues at this slice."""
    async with (
        bulk_source(WEIGHTS, hook=halting(1)) as (_, hung),
        bulk_source(WEIGHTS) as (trainer, address),
    ):
        logs = await fetch_from(Worker(silence_s=0.5), address, peers=[hung])
    assert trainer.requests[0].from_byte == MIB
    assert failed(logs) == ["the bulk connection: timed out"] and ways(logs) == ["bulk"]


async def test_cut_connection_continues_at_its_slice() -> None:
    """At the only source over gRPC, for a while."""

    async def cut(send: Send, data: Sequence[memoryview]) -> None:
        await send([data[0][: MIB // 2]])
        raise ConnectionResetError("cut")

    async with bulk_source(WEIGHTS, hook=cut) as (source, address):
        logs = await fetch_from(Worker(silence_s=60.0), address)
    assert [request.bulk for request in source.requests] == [True, False]
    assert ways(logs) == ["grpc"]


async def test_port_that_cannot_be_reached_leaves_the_source_to_grpc() -> None:
    """The same source sends the bytes; nothing is retried."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))

        class Elsewhere(BulkServer):
            def stream(self) -> BulkStream | None:
                stream = super().stream()
                assert stream is not None
                stream.offer.port = closed.getsockname()[1]
                return stream

        async with bulk_source(WEIGHTS, server=Elsewhere) as (source, address):
            logs = await fetch_from(Worker(silence_s=60.0), address)
    assert [request.bulk for request in source.requests] == [True, False]
    assert "Connection refused" in failed(logs)[0] and ways(logs) == ["grpc"]


async def test_other_program_at_the_port_leaves_the_source_to_grpc() -> None:
    """One that accepts and closes, as a proxy may."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    stranger = await asyncio.start_server(close, "127.0.0.1", 0)

    class Elsewhere(BulkServer):
        def stream(self) -> BulkStream | None:
            stream = super().stream()
            assert stream is not None
            stream.offer.port = stranger.sockets[0].getsockname()[1]
            return stream

    async with bulk_source(WEIGHTS, server=Elsewhere) as (_, address):
        logs = await fetch_from(Worker(silence_s=60.0), address)
    stranger.close()
    assert ways(logs) == ["grpc"] and len(failed(logs)) == 1


async def test_caller_that_never_connects_gets_all_data_in_the_call() -> None:
    """The source waits for a limited time."""
    source = BulkSource(wait_s=0.05)
    source.hold(1, WEIGHTS)
    address = await source.start()
    worker = Worker(silence_s=60.0)
    worker.follower._client.bulk.connect = _none  # type: ignore[method-assign, assignment]
    logs = await fetch_from(worker, address)
    await source.stop()
    assert ways(logs) == ["grpc"] and not failed(logs)


async def _none(*arguments: object, **options: object) -> None:
    """Opens no connection."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.issue(tmp_path_factory.mktemp("tls"))


def secured(files: Certificates, *, named: bool = True) -> Security:
    """Credentials of a host; with `named`, its certificate too."""
    cert, key = (files.cert, files.key) if named else ("", "")
    return Security(KEYRING, subject="test", tls_ca=files.ca, tls_cert=cert, tls_key=key)


async def test_bytes_are_encrypted_where_grpc_is(certificates: Certificates) -> None:
    """Both ends show certificates of one authority."""
    security = secured(certificates)
    async with bulk_source(WEIGHTS, security=security) as (source, address):
        logs = await fetch_from(Worker(silence_s=60.0, security=security), address)
        port = source.bulk._listener.getsockname()[1]  # type: ignore[union-attr]
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(bytes(64))
            answer = await asyncio.to_thread(_all_of, plain)
    assert ways(logs) == ["bulk"]
    # At most a TLS alert: its record type is 21.
    assert not answer or answer[0] == 21


def _all_of(sock: socket.socket) -> bytes:
    found = b""
    try:
        while piece := sock.recv(4096):
            found += piece
    except ConnectionResetError:
        pass
    return found


async def test_source_with_another_certificate_is_not_read(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Neither does a source send to a client without a certificate of its authority."""
    other = Certificates.issue(tmp_path / "other")
    async with bulk_source(WEIGHTS, security=secured(certificates)) as (_, address):
        for stranger in (secured(other), secured(certificates, named=False)):
            worker = Worker(silence_s=60.0, security=secured(certificates))
            worker.follower._client.bulk._security = stranger
            logs = await fetch_from(worker, address)
            assert ways(logs) == ["grpc"] and len(failed(logs)) == 1
