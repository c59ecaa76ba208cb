"""The pieces of streamed answers: which are sent at once, which together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from forge.core.errors import Unavailable
from forge.core.token_columns import int32_array
from forge.runtime.rpc import served_stream
from forge.v1 import inference_pb2 as pb
from services.inference.router import sample_stream
from services.inference.router.sample_stream import Sample, SampleStreams
from tests.support.gateway.sample_router import WAIT_S, request, response

NEVER_S = 1e6
"""An interval that does not end in a test."""


async def _one_request() -> AsyncIterator[pb.SampleStreamRequest]:
    """Begins one call; the stream of requests stays open."""
    begin = pb.SampleBegin(call=1, request=request(1), timeout_s=WAIT_S)
    yield pb.SampleStreamRequest(begin=[begin])
    await asyncio.Event().wait()


async def _pieces(sample: Sample, *, interval_s: float) -> AsyncGenerator[list[int], None]:
    """Yields the token ids of each event."""
    streams = SampleStreams(sample, interval_s=interval_s)
    async with asyncio.timeout(WAIT_S):
        async for message in streams.serve(_one_request()):
            for event in message.events:
                if event.HasField("response"):
                    yield list(int32_array(event.response.tokens.ids))


async def test_pieces_between_the_first_and_the_end_are_sent_as_one() -> None:
    """The first piece does not wait, and the end of the answer takes the held pieces along."""
    read_first = asyncio.Event()

    async def sample(_: pb.SampleRequest) -> AsyncGenerator[pb.SampleResponse, None]:
        yield response(0)
        await read_first.wait()
        for number in range(1, 9):
            yield response(number)
            await asyncio.sleep(0)
        yield response(9, last=True)

    pieces = _pieces(sample, interval_s=NEVER_S)
    assert await anext(pieces) == [0]
    read_first.set()
    assert await anext(pieces) == list(range(1, 10))


async def test_held_pieces_are_sent_after_the_interval() -> None:
    """An answer whose next token is slow does not keep the tokens before it."""

    async def sample(_: pb.SampleRequest) -> AsyncGenerator[pb.SampleResponse, None]:
        for number in range(3):
            yield response(number)
        await asyncio.Event().wait()

    pieces = _pieces(sample, interval_s=0.01)
    assert [await anext(pieces), await anext(pieces)] == [[0], [1, 2]]


async def test_an_interval_of_zero_sends_each_piece_at_once() -> None:
    """Without an interval no piece is joined with another."""

    async def sample(_: pb.SampleRequest) -> AsyncGenerator[pb.SampleResponse, None]:
        for number in range(3):
            yield response(number)
        await asyncio.Event().wait()

    pieces = _pieces(sample, interval_s=0)
    assert [await anext(pieces) for _ in range(3)] == [[0], [1], [2]]


async def test_many_held_bytes_are_sent_before_the_interval_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of held pieces is bounded."""
    monkeypatch.setattr(sample_stream, "HELD_BYTES", 3 * response(1).ByteSize())

    async def sample(_: pb.SampleRequest) -> AsyncGenerator[pb.SampleResponse, None]:
        for number in range(4):
            yield response(number)
        await asyncio.Event().wait()

    pieces = _pieces(sample, interval_s=NEVER_S)
    assert [await anext(pieces), await anext(pieces)] == [[0], [1, 2, 3]]


async def test_an_answer_that_fails_sends_its_held_pieces_before_the_error() -> None:
    """Tokens that were sampled before a failure reach the gateway."""

    async def sample(_: pb.SampleRequest) -> AsyncGenerator[pb.SampleResponse, None]:
        for number in range(3):
            yield response(number)
        raise Unavailable("lost")

    streams = SampleStreams(sample, interval_s=NEVER_S)
    messages = streams.serve(_one_request())
    events: list[pb.SampleEvent] = []
    async with asyncio.timeout(WAIT_S):
        while not (events and events[-1].HasField("end")):
            events += (await anext(messages)).events
    ids = [list(int32_array(event.response.tokens.ids)) for event in events[:-1]]
    assert ids == [[0], [1, 2]]
    assert events[-1].end.status_code


async def test_a_cancelled_answer_leaves_no_held_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held pieces of cancelled answers do not fill the window of the stream."""
    cancelled, sampled = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(served_stream, "WINDOW_BYTES", 3 * response(1).ByteSize())

    async def sample(asked: pb.SampleRequest) -> AsyncGenerator[pb.SampleResponse, None]:
        yield response(0)
        yield response(1)
        sampled.set()
        await asyncio.Event().wait()

    streams = SampleStreams(sample, interval_s=NEVER_S)

    async def requests() -> AsyncIterator[pb.SampleStreamRequest]:
        for call in range(1, 21):
            begin = pb.SampleBegin(call=call, request=request(call), timeout_s=WAIT_S)
            sampled.clear()
            yield pb.SampleStreamRequest(begin=[begin])
            await sampled.wait()
            yield pb.SampleStreamRequest(cancel=[call])
        cancelled.set()

    async with asyncio.timeout(WAIT_S):
        messages = [message async for message in streams.serve(requests())]
    assert cancelled.is_set()
    assert sum(len(message.events) for message in messages) >= 20
