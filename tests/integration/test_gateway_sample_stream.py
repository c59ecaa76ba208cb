"""Many answers on one stream between gateway and router: both real sides over a real socket."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import grpc.aio
import pytest

from forge.core.errors import (
    DeadlineExceeded,
    ForgeError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from forge.core.token_columns import int32_array
from forge.runtime.rpc import served_stream
from forge.runtime.rpc.tokens import joined_responses
from forge.v1 import common_pb2, inference_pb2
from services.gateway.router.sample_call import MAX_QUEUED_RESPONSES
from services.inference.router import sample_stream as router_side
from tests.support.gateway.sample_router import (
    WAIT_S,
    Router,
    begin,
    call_of,
    connected,
    listening,
    request,
    response,
    rest,
)
from tests.support.runtime.waiting import until


async def test_answers_on_one_stream_do_not_mix() -> None:
    """Hundreds of parallel calls each get their own tokens, in order, on one stream."""
    async with listening() as router, connected(router) as streams:
        prompts = [list(range(n, n + 1 + n % 7)) for n in range(300)]
        answers = [await begin(streams, request(*prompt)) for prompt in prompts]
        assert await asyncio.gather(*map(rest, answers)) == prompts
        assert router.streams == 1


async def test_aborted_call_ends_alone() -> None:
    """Its reader gets None, the router stops sampling it, the others finish."""
    async with listening() as router, connected(router) as streams:
        aborted = await begin(streams, request(1, 2, name="hold-aborted"))
        other = await begin(streams, request(3, 4, name="hold-other"))
        assert await aborted.read_response() == response(1)
        reading = asyncio.create_task(aborted.read_response())
        await asyncio.sleep(0)
        aborted.abort()
        assert await reading is None
        await router.until_left("hold-aborted")
        router.go_on.set()
        assert await rest(other) == [3, 4]


async def test_call_aborted_before_it_began_is_not_sent() -> None:
    """A session that closes meanwhile calls no router."""
    async with listening() as router, connected(router) as streams:
        call = call_of(streams)
        call.set_request(request(1, name="hold"))
        call.abort()
        assert await call.read_response() is None
        assert await rest(await begin(streams, request(2))) == [2]
        assert not router.left


async def test_death_of_a_router_is_unavailable_for_each_call() -> None:
    """Each gets the received tokens, then the error; the next call finds another router."""
    async with listening() as dying, connected(dying) as streams, listening() as second:
        answers = [await begin(streams, request(n, n, name=f"hold-{n}")) for n in range(3)]
        for number, answer in enumerate(answers):
            assert await answer.read_response() == response(number)
        await dying.server.stop(None)
        for answer in answers:
            with pytest.raises(Unavailable):
                await answer.read_response()
        cast(Any, streams)._remote.routers.append(second)
        assert await rest(await begin(streams, request(5))) == [5]


async def test_dead_address_is_unavailable() -> None:
    """Also of a router that died before its lease ended."""
    async with listening() as router, connected(router) as streams:
        await router.server.stop(None)
        answer = await begin(streams, request(1))
        with pytest.raises(Unavailable):
            await answer.read_response()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("busy", ResourceExhausted, "7 requests are waiting"),
        ("bug", ForgeError, "internal error"),
        ("cancelled", Unavailable, "the router cancelled the call"),
    ],
)
async def test_error_of_one_call_leaves_the_others(
    name: str, error: type[ForgeError], message: str
) -> None:
    """It arrives as its class, with its hint; the cause of a bug stays in the log."""
    async with listening() as router, connected(router) as streams:
        other = await begin(streams, request(1, 2, name="hold"))
        answer = await begin(streams, request(1, name=name))
        with pytest.raises(error, match=message) as caught:
            await answer.read_response()
        assert type(caught.value) is error
        assert caught.value.retry_after_s == (1.5 if name == "busy" else None)
        router.go_on.set()
        assert await rest(other) == [1, 2]


async def test_deadline_ends_its_call_on_both_sides() -> None:
    """The caller gets DeadlineExceeded, the router stops; others keep their own deadline."""
    async with listening() as router, connected(router) as streams:
        other = await begin(streams, request(1, 2, name="hold-other"))
        late = await begin(streams, request(3, 4, name="hold-late"), timeout_s=0.2)
        with pytest.raises(DeadlineExceeded):
            await rest(late)
        # Behind it: whatever the router was told of the late call, it has heard.
        assert await rest(await begin(streams, request(5))) == [5]
        await until(lambda: router.at_work == {"hold-other"})
        router.go_on.set()
        assert await rest(other) == [1, 2]


async def test_router_enforces_the_deadline_itself() -> None:
    """Also for a hung caller."""
    router = Router()

    async def requests() -> AsyncIterator[inference_pb2.SampleStreamRequest]:
        begun = inference_pb2.SampleBegin(call=1, request=request(1, 2, name="hold"), timeout_s=0.1)
        yield inference_pb2.SampleStreamRequest(begin=[begun])

    events = [event async for said in router.kept.serve(requests()) for event in said.events]
    assert events[0].response == response(1)
    assert events[-1].end.status_code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert router.left == ["hold"]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
async def test_call_without_a_deadline_is_refused(timeout_s: float) -> None:
    """It is not sampled, and the others on its stream are."""
    router = Router()

    async def requests() -> AsyncIterator[inference_pb2.SampleStreamRequest]:
        begun = [
            inference_pb2.SampleBegin(call=1, request=request(1), timeout_s=timeout_s),
            inference_pb2.SampleBegin(call=2, request=request(2), timeout_s=WAIT_S),
        ]
        yield inference_pb2.SampleStreamRequest(begin=begun)

    events = [event async for said in router.kept.serve(requests()) for event in said.events]
    ends = {event.call: event.end for event in events if event.HasField("end")}
    assert ends[1].status_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "timeout_s" in ends[1].details
    assert ends[2].status_code == 0


async def test_slow_reader_delays_no_other() -> None:
    """Its tokens are joined, in order, into few responses; others get theirs."""
    async with listening() as router, connected(router) as streams:
        ids = list(range(3000))
        slow = await begin(streams, request(*ids))
        assert await rest(await begin(streams, request(1, 2))) == [1, 2]
        while not cast(Any, slow)._ended:
            assert await rest(await begin(streams, request(3))) == [3]
        assert len(cast(Any, slow)._responses) <= MAX_QUEUED_RESPONSES
        whole = await slow.read_response()
        assert whole is not None
        assert list(int32_array(whole.tokens.ids)) == ids
        assert whole.finish_reason == common_pb2.FINISH_REASON_STOP
        assert await slow.read_response() is None


async def test_calls_wait_for_a_gateway_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream holds a bounded number of tokens; once read, its calls continue."""
    monkeypatch.setattr(served_stream, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(served_stream, "MESSAGE_BYTES", 100)
    given = 0

    async def sample(asked: Any) -> AsyncGenerator[inference_pb2.SampleResponse, None]:
        nonlocal given
        for number in range(500):
            given += 1
            yield response(number)

    async def requests() -> AsyncIterator[inference_pb2.SampleStreamRequest]:
        begun = [
            inference_pb2.SampleBegin(call=n, request=request(1), timeout_s=WAIT_S) for n in (1, 2)
        ]
        yield inference_pb2.SampleStreamRequest(begin=begun)

    said = router_side.SampleStreams(sample, interval_s=0).serve(requests())
    first = await anext(said)
    for _ in range(100):
        await asyncio.sleep(0)
    assert given * response(1).ByteSize() < 2000
    events = list(first.events) + [event async for message in said for event in message.events]
    assert given == 1000
    for call in (1, 2):
        ids = [i for e in events if e.call == call for i in int32_array(e.response.tokens.ids)]
        assert ids == list(range(500))


async def test_refused_calls_wait_for_a_slow_gateway_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that only sends is not read forever."""
    monkeypatch.setattr(served_stream, "WINDOW_BYTES", 1000)
    asked = 0

    async def refused(_: Any) -> AsyncGenerator[inference_pb2.SampleResponse, None]:
        raise ResourceExhausted("too many wait")
        yield

    async def requests() -> AsyncIterator[inference_pb2.SampleStreamRequest]:
        nonlocal asked
        for call in range(1, 501):
            asked += 1
            begun = inference_pb2.SampleBegin(call=call, request=request(1), timeout_s=WAIT_S)
            yield inference_pb2.SampleStreamRequest(begin=[begun])
            await asyncio.sleep(0)

    said = router_side.SampleStreams(refused, interval_s=0).serve(requests())
    first = await anext(said)
    for _ in range(2000):
        await asyncio.sleep(0)
    assert asked < 50
    ends = len(first.events) + sum([len(message.events) async for message in said])
    assert ends == 500


async def test_large_events_are_sent_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may fill a message up to gRPC's limit; two together would exceed it."""
    monkeypatch.setattr(served_stream, "MESSAGE_BYTES", 1000)

    async def sample(_: Any) -> AsyncGenerator[inference_pb2.SampleResponse, None]:
        for size in (10, 20, 900, 10, 200):
            yield response(*range(size))

    async def requests() -> AsyncIterator[inference_pb2.SampleStreamRequest]:
        begun = inference_pb2.SampleBegin(call=1, request=request(1), timeout_s=WAIT_S)
        yield inference_pb2.SampleStreamRequest(begin=[begun])

    said = [
        message
        async for message in router_side.SampleStreams(sample, interval_s=0).serve(requests())
    ]
    for message in said:
        assert len(message.events) == 1 or message.ByteSize() <= 1000 + 50
    ids = [i for m in said for e in m.events for i in int32_array(e.response.tokens.ids)]
    assert len(ids) == 10 + 20 + 900 + 10 + 200


async def test_draining_router_finishes_its_calls() -> None:
    """New ones are refused, then the stream ends."""
    async with listening() as router, connected(router) as streams:
        answer = await begin(streams, request(1, 2, name="hold"))
        assert await answer.read_response() == response(1)
        router.kept.drain()
        with pytest.raises(Unavailable, match="draining"):
            await (await begin(streams, request(3))).read_response()
        router.go_on.set()
        assert await rest(answer) == [2]
        async with asyncio.timeout(WAIT_S):
            await router.server.stop(WAIT_S)


async def test_request_larger_than_a_message_is_refused_alone() -> None:
    """The stream and its other calls continue."""
    async with listening() as router, connected(router) as streams:
        other = await begin(streams, request(1, 2, name="hold"))
        with pytest.raises(InvalidArgument, match="5000005 bytes"):
            await begin(streams, inference_pb2.SampleRequest(prompt_ids=bytes(5_000_000)))
        router.go_on.set()
        assert await rest(other) == [1, 2]


def test_joined_responses_keep_every_column() -> None:
    """All columns of a token are joined; the end is that of the last response."""
    first, last = response(1, 2), response(3, last=True)
    for part in (first, last):
        part.tokens.allowed_logprobs = part.tokens.logprobs
    last.cached_tokens = 5
    whole = joined_responses([first, last])
    assert list(int32_array(whole.tokens.ids)) == [1, 2, 3]
    for column in ("logprobs", "weight_versions", "allowed_logprobs"):
        both = getattr(first.tokens, column) + getattr(last.tokens, column)
        assert getattr(whole.tokens, column) == both
    assert (whole.finish_reason, whole.cached_tokens) == (last.finish_reason, 5)
