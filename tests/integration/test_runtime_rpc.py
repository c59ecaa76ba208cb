"""The RPC server and its channels over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from forge.core.errors import ConfigError, InvalidArgument, NotFound, StaleFence, Unavailable
from forge.runtime.rpc import Channels, RpcServer, from_rpc_error, translated
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Claims, Keyring
from forge.v1 import pool_pb2, pool_pb2_grpc
from tests.support.runtime.echo import FULL_NAME, SCOPES, EchoServicer, EchoStub, add_to_server
from tests.support.runtime.etcd import Certificates
from tests.support.runtime.waiting import until

KEYRING = Keyring.from_bytes(b"k" * 32)


@dataclass
class Served:
    server: RpcServer
    servicer: EchoServicer
    address: str
    security: Security
    stub: EchoStub


async def serve(security: Security) -> tuple[RpcServer, EchoServicer, str]:
    servicer = EchoServicer()
    server = RpcServer(service="echo", host="127.0.0.1", port=0, security=security)
    server.add_service(add_to_server, servicer, full_name=FULL_NAME, scopes=SCOPES)
    return server, servicer, await server.start()


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    """An echo server and a stub whose channel carries a service token."""
    security = Security(KEYRING, subject="tester")
    server, servicer, address = await serve(security)
    channels = Channels(security)
    yield Served(server, servicer, address, security, EchoStub(channels.get(address)))
    await channels.close()
    await server.stop(grace_s=0)


def words(*texts: str) -> AsyncIterator[bytes]:
    async def iterate() -> AsyncIterator[bytes]:
        for text in texts:
            yield text.encode()

    return iterate()


def words_or_silence(text: str) -> AsyncIterator[bytes] | None:
    """None for "": a stream that is left open, and that nobody writes to."""
    return words(text) if text else None


async def gather(call: Any) -> list[str]:
    return [answer.decode() async for answer in call]


Caller = Callable[[EchoStub, str, Any], Awaitable[Any]]


async def call_unary(stub: EchoStub, text: str, metadata: Any = None) -> Any:
    return await stub.Unary(text.encode(), timeout=30, metadata=metadata)


async def call_unary_stream(stub: EchoStub, text: str, metadata: Any = None) -> Any:
    return await gather(stub.UnaryStream(text.encode(), timeout=30, metadata=metadata))


async def call_stream_unary(stub: EchoStub, text: str, metadata: Any = None) -> Any:
    return await stub.StreamUnary(words_or_silence(text), timeout=30, metadata=metadata)


async def call_stream_stream(stub: EchoStub, text: str, metadata: Any = None) -> Any:
    call = stub.StreamStream(words_or_silence(text), timeout=30, metadata=metadata)
    return await gather(call)


async def call_written(stub: EchoStub, text: str, metadata: Any = None) -> Any:
    return await gather(stub.Written(text.encode(), timeout=30, metadata=metadata))


all_kinds = pytest.mark.parametrize(
    "call",
    [call_unary, call_unary_stream, call_stream_unary, call_stream_stream, call_written],
)


@all_kinds
async def test_every_kind_of_call_carries_the_callers_token(served: Served, call: Caller) -> None:
    """A handler knows its caller, without code on either side."""
    answer = await call(served.stub, "who", None)
    assert answer in (b"tester", ["tester"])


@all_kinds
async def test_every_kind_of_call_without_a_token_is_unauthenticated(
    served: Served, call: Caller
) -> None:
    """I8: without a credential no call is answered and no handler runs."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            # Of a stream that is refused while it is written to, grpc may lose the status.
            await call(EchoStub(channel), "", None)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert served.servicer.seen == []


@all_kinds
async def test_forge_error_of_a_handler_is_raised_to_the_caller(
    served: Served, call: Caller
) -> None:
    """Class, message and retry hint, on streams too."""
    with pytest.raises(StaleFence, match="told to raise StaleFence") as caught:
        async with translated():
            await call(served.stub, "raise:StaleFence", None)
    assert caught.value.retry_after_s == 0.25


@all_kinds
async def test_bug_in_a_handler_is_internal_without_its_cause(served: Served, call: Caller) -> None:
    """The cause is in the log only."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(served.stub, "crash", None)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")


async def test_token_without_the_scope_is_denied_and_names_it(served: Served) -> None:
    """The error names the missing and the present scopes."""
    token = KEYRING.sign(Claims(subject="agent", scopes=frozenset({"session"})))
    metadata = (("authorization", f"Bearer {token}"),)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Unary(b"who", timeout=30, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "needs scope service; the token of agent has session" in (caught.value.details() or "")


async def test_callers_own_token_overrides_the_channels(served: Served) -> None:
    """A session has its own rights even through a service's channel."""
    token = KEYRING.sign(Claims(subject="agent", scopes=frozenset({"session"})))
    metadata = (("authorization", f"Bearer {token}"),)
    answer = await served.stub.ForSessions(b"who", timeout=30, metadata=metadata)
    assert answer == b"agent"
    with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
        await served.stub.ForSessions(b"who", timeout=30)


async def test_open_method_needs_no_token_and_reads_one(served: Served) -> None:
    """Scope "" accepts every caller, with the claims of a token if there is one."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        assert await EchoStub(channel).Open(b"who", timeout=30) == b"nobody"
    assert await served.stub.Open(b"who", timeout=30) == b"tester"


class Pool(pool_pb2_grpc.PoolServiceServicer):
    """Takes whatever is a message."""

    async def PutGroups(self, request: Any, context: Any) -> Any:
        return pool_pb2.PutGroupsResponse()

    async def AppendTurns(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            yield pool_pb2.AppendTurnsResponse()


async def test_corrupt_message_is_invalid_argument_and_counted() -> None:
    """On a stream and before it; a caller without a token gets no detail."""
    security = Security(KEYRING, subject="tester")
    server = RpcServer(service="pool", host="127.0.0.1", port=0, security=security)
    name = "forge.v1.PoolService"
    server.add_service(pool_pb2_grpc.add_PoolServiceServicer_to_server, Pool(), full_name=name)
    metadata = (("authorization", f"Bearer {security.token_for('PoolService')}"),)
    channel: Any = grpc.aio.insecure_channel(await server.start())
    async with channel:
        put, append = f"/{name}/PutGroups", f"/{name}/AppendTurns"
        calls: tuple[Any, ...] = (
            channel.unary_unary(put)(b"\xff\xff", timeout=30, metadata=metadata),
            gather(channel.stream_stream(append)([b"\xff"], timeout=30, metadata=metadata)),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError, match="the request cannot be read") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await channel.unary_unary(put)(b"\xff\xff", timeout=30)
    for method in (put, append):
        labels = {"method": method, "code": "INVALID_ARGUMENT"}
        assert REGISTRY.get_sample_value("forge_rpc_calls_total", labels)
    await server.stop(grace_s=0)


async def test_unknown_method_is_unimplemented(served: Served) -> None:
    """A newer client can handle this status."""
    channel: Any = grpc.aio.insecure_channel(served.address)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await channel.unary_unary(f"/{FULL_NAME}/NoSuch")(b"", timeout=30)


async def test_health_follows_set_serving_for_the_process_and_each_service(served: Served) -> None:
    """Standard health checking: NOT_SERVING at first, open to every caller."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for serving in (False, True, False):
            served.server.set_serving(serving)
            for name in ("", FULL_NAME):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
                status = health_pb2.HealthCheckResponse
                assert answer.status == (status.SERVING if serving else status.NOT_SERVING)


async def test_reflection_lists_the_services(served: Served) -> None:
    """grpcurl works without any proto files."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=30
        )
        answers = [answer async for answer in call]
    names = {entry.name for entry in answers[0].list_services_response.service}
    assert {FULL_NAME, "grpc.health.v1.Health"} <= names


async def test_occupied_port_is_one_line_that_names_it() -> None:
    """Two servers never share a port silently."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = RpcServer(service="pool", host="127.0.0.1", port=port, security=Security(KEYRING))
        with pytest.raises(ConfigError) as caught:
            await server.start()
    assert str(caught.value) == (
        f"pool cannot listen on 127.0.0.1:{port}: address already in use; "
        "choose another with --port, or 0 for any free one"
    )


async def test_stop_finishes_running_calls_and_refuses_new_ones(served: Served) -> None:
    """New ones are UNAVAILABLE, to be retried elsewhere."""
    in_flight = asyncio.ensure_future(served.stub.Unary(b"wait", timeout=30))
    await served.servicer.entered.wait()
    stopping = asyncio.create_task(served.server.stop(grace_s=30))
    while True:
        try:
            await served.stub.Unary(b"say:x", timeout=30)
        except grpc.aio.AioRpcError as error:
            assert isinstance(from_rpc_error(error), Unavailable)
            break
    served.servicer.gate.set()
    assert await in_flight == b"waited"
    await stopping


async def test_disconnected_client_cancels_its_handler(served: Served) -> None:
    """The call is counted as CANCELLED."""
    labels = {"method": f"/{FULL_NAME}/Unary", "code": "CANCELLED"}
    before = REGISTRY.get_sample_value("forge_rpc_calls_total", labels) or 0
    call = served.stub.Unary(b"wait", timeout=30)
    pending = asyncio.ensure_future(call)
    await served.servicer.entered.wait()
    call.cancel()
    await asyncio.wait({pending})
    await until(lambda: (REGISTRY.get_sample_value("forge_rpc_calls_total", labels) or 0) != before)


async def test_message_of_four_mebibytes_fits_and_a_bigger_one_is_refused(served: Served) -> None:
    """The limit is 4 MiB of payload, both ways: beyond it the status is not retryable, and the call
    is counted by it."""
    payload = "say:" + "x" * (4 << 20)
    answer = await served.stub.Unary(payload.encode(), timeout=30)
    assert len(answer) == 4 << 20
    labels = {"method": f"/{FULL_NAME}/StreamStream", "code": "INVALID_ARGUMENT"}
    before = REGISTRY.get_sample_value("forge_rpc_calls_total", labels) or 0
    for size in (5 << 20, 20 << 20):
        with pytest.raises(InvalidArgument, match=f"{size}.* 4259840|larger than max .{size}"):
            async with translated():
                await served.stub.Unary(b"x" * size, timeout=30)
    with pytest.raises(InvalidArgument, match="a request of 5242880 bytes: one message holds"):
        async with translated():
            await gather(served.stub.StreamStream(words("x" * (5 << 20)), timeout=30))
    assert REGISTRY.get_sample_value("forge_rpc_calls_total", labels) == before + 1


async def test_response_larger_than_a_message_is_refused_by_size(served: Served) -> None:
    """The call does not count as successful."""
    for call in (served.stub.Unary, lambda *a, **k: gather(served.stub.UnaryStream(*a, **k))):
        with pytest.raises(InvalidArgument, match=r"an answer of 5242880 bytes.* request less"):
            async with translated():
                await call(b"long:5242880", timeout=30)


async def test_error_of_a_nested_call_is_passed_on(served: Served) -> None:
    """A handler does not turn another service's NOT_FOUND into INTERNAL."""
    with pytest.raises(grpc.aio.AioRpcError) as upstream:
        await served.stub.Unary(b"raise:NotFound", timeout=30)
    served.servicer.failures.append(upstream.value)
    with pytest.raises(NotFound, match="told to raise NotFound"):
        async with translated():
            await served.stub.Unary(b"say:x", timeout=30)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.issue(tmp_path_factory.mktemp("tls"))


async def ask_over(server_security: Security, client_security: Security) -> bytes:
    server, _, address = await serve(server_security)
    channels = Channels(client_security)
    try:
        answer: bytes = await EchoStub(channels.get(address)).Unary(b"who", timeout=30)
        return answer
    finally:
        await channels.close()
        await server.stop(grace_s=0)


async def test_mutual_tls_accepts_clients_with_a_certificate(certificates: Certificates) -> None:
    """With a certificate authority both sides must have one."""
    security = Security(
        KEYRING,
        subject="tls",
        tls_cert=certificates.cert,
        tls_key=certificates.key,
        tls_ca=certificates.ca,
    )
    assert await ask_over(security, security) == b"tls"
    nameless = Security(KEYRING, tls_ca=certificates.ca)
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await ask_over(security, nameless)


async def test_tls_without_client_certificates_accepts_agents_by_token(
    certificates: Certificates,
) -> None:
    """A gateway may accept clients with a token and no certificate."""
    server_security = Security(
        KEYRING,
        tls_cert=certificates.cert,
        tls_key=certificates.key,
        tls_ca=certificates.ca,
        tls_client_auth=False,
    )
    nameless = Security(KEYRING, subject="agent", tls_ca=certificates.ca)
    assert await ask_over(server_security, nameless) == b"agent"


async def test_plaintext_client_is_refused_by_a_tls_server(
    certificates: Certificates,
) -> None:
    """Nothing is said in the clear by mistake."""
    security = Security(KEYRING, tls_cert=certificates.cert, tls_key=certificates.key)
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await ask_over(security, Security(KEYRING))
