"""The error tree and big messages on the wire."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core import errors
from forge.core.errors import ForgeError, InvalidArgument, ResourceExhausted, Unavailable
from forge.runtime.rpc import CHUNK_BYTES, Joiner, from_rpc_error, split, to_status, translated
from forge.runtime.rpc.status import trailing_metadata
from forge.v1.common_pb2 import Chunk


def every_error() -> list[type[ForgeError]]:
    return [
        error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, ForgeError)
    ]


def on_the_wire(error: BaseException) -> grpc.aio.AioRpcError:
    code, details = to_status(error)
    metadata = grpc.aio.Metadata(*trailing_metadata(error))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


@pytest.mark.parametrize("error_type", every_error())
def test_every_error_survives_the_wire(error_type: type[ForgeError]) -> None:
    """Class, text and retry hint arrive; so does the code, for clients that know only that."""
    sent = error_type("what happened", retry_after_s=1.5)
    wire = on_the_wire(sent)
    assert wire.code().name == error_type.code
    received = from_rpc_error(wire)
    assert (type(received), str(received), received.retry_after_s) == (
        error_type,
        "what happened",
        1.5,
    )


def test_services_own_error_arrives_as_its_ancestor_in_the_tree() -> None:
    """The receiver gets the nearest error class that it knows."""

    class ShardLocked(errors.StaleFence):
        def __init__(self) -> None:
            super().__init__("locked by another")

    received = from_rpc_error(on_the_wire(ShardLocked()))
    assert (type(received), str(received)) == (errors.StaleFence, "locked by another")


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name != "OK"])
def test_every_status_of_a_foreign_server_becomes_an_error(code: grpc.StatusCode) -> None:
    """Without Forge's metadata the code decides."""
    metadata = grpc.aio.Metadata()
    received = from_rpc_error(grpc.aio.AioRpcError(code, metadata, metadata, "foreign"))
    assert isinstance(received, ForgeError)
    exact = {error.code for error in every_error()}
    if code.name in exact:
        assert received.code == code.name


@pytest.mark.parametrize(
    "details", ["Stream removed", "Received RST_STREAM with error code 2", "Socket closed"]
)
def test_peer_that_dies_during_a_call_is_unavailable(details: str) -> None:
    """grpc reports some lost connections as UNKNOWN or INTERNAL; Forge retries them."""
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, metadata, metadata, details)
    assert isinstance(from_rpc_error(error), Unavailable)


def test_bug_becomes_internal_without_its_text() -> None:
    """An exception other than ForgeError may contain secrets."""
    code, details = to_status(KeyError("password"))
    assert code is grpc.StatusCode.INTERNAL
    assert "password" not in details


async def test_translated_works_as_a_block_and_as_a_decorator() -> None:
    """Both raise the ForgeError and keep the grpc error as its cause."""

    @translated()
    async def call() -> None:
        raise on_the_wire(errors.NotFound("gone"))

    with pytest.raises(errors.NotFound) as caught:
        await call()
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
    with pytest.raises(errors.NotFound):
        async with translated():
            raise on_the_wire(errors.NotFound("gone"))


@given(
    sizes=st.lists(
        st.one_of(
            st.integers(0, 100),
            st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]),
        ),
        max_size=4,
    )
)
def test_split_messages_are_joined_again(sizes: list[int]) -> None:
    """Splitting and joining is the identity, for any sizes, one message after another."""
    messages = [bytes([index]) * size for index, size in enumerate(sizes)]
    joiner = Joiner()
    joined = []
    for message in messages:
        chunks = list(split(message))
        assert all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        joined += [whole for chunk in chunks if (whole := joiner.add(chunk)) is not None]
    assert joined == messages
    assert joiner.pending_bytes == 0


def test_message_beyond_its_limit_is_refused_early() -> None:
    """Before all of it is received."""
    joiner = Joiner(max_bytes=10)
    joiner.add(Chunk(data=b"x" * 8))
    with pytest.raises(ResourceExhausted, match="exceeds 10 bytes"):
        joiner.add(Chunk(data=b"x" * 8))


def test_oversized_chunk_is_an_invalid_argument() -> None:
    """The chunk size is part of the protocol."""
    with pytest.raises(InvalidArgument, match=f"at most {CHUNK_BYTES}"):
        Joiner().add(Chunk(data=b"x" * (CHUNK_BYTES + 1)))
