"""Retries of one answer on routers that fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge.core.errors import ForgeError, Unavailable
from forge.core.token_columns import int32_array, int32_bytes
from forge.v1 import common_pb2, inference_pb2
from services.gateway.errors import RouterLost
from services.gateway.router import sample_call as sample_call_module
from services.gateway.router.sample_call import SampleCall

GONE = Unavailable("the router is gone")
LOST = RouterLost("the stream to the router was lost")
END = "end"
WAIT_S = 30.0

Event = int | str | ForgeError | None
"""A sampled token, the finish reason, an error, or the end of the RPC without an error."""


class Streams:
    """Streams to routers that answer each attempt by a script."""

    def __init__(self, *attempts: list[Event]) -> None:
        self._attempts = list(attempts)
        self.receiver: SampleCall
        self.request_ids: list[str] = []
        self.cancelled: list[int] = []

    async def pick_stream(self, *, timeout_s: float) -> Streams:
        return self

    def send_request(
        self, request: inference_pb2.SampleRequest, receiver: SampleCall, *, timeout_s: float
    ) -> int:
        self.receiver = receiver
        self.request_ids.append(request.request_id)
        for event in self._attempts.pop(0):
            self.say(event)
        return len(self.request_ids)

    def say(self, event: Event) -> None:
        match event:
            case int():
                tokens = common_pb2.SampledTokens(ids=int32_bytes([event]))
                self.receiver.on_response(inference_pb2.SampleResponse(tokens=tokens))
            case str():
                stop = common_pb2.FINISH_REASON_STOP
                self.receiver.on_response(inference_pb2.SampleResponse(finish_reason=stop))
            case _:
                self.receiver.on_end(event)

    def cancel_request(self, number: int) -> None:
        self.cancelled.append(number)


class Agent:
    """Reads one call; `ids` is the answer as it stands."""

    def __init__(
        self, streams: Streams, *, streamed: bool = False, retry_for_s: float = 60.0
    ) -> None:
        self.call = SampleCall(
            cast(Any, streams), timeout_s=WAIT_S, retry_for_s=retry_for_s, streamed=streamed
        )
        self.ids: list[int] = []
        self.retries = 0
        request = inference_pb2.SampleRequest(request_id=self.call.call_id)
        self.call.set_request(request, on_retry=self._drop)

    def _drop(self) -> None:
        self.retries += 1
        self.ids.clear()

    async def read(self) -> bool:
        response = await self.call.read_response()
        if response is not None:
            self.ids += int32_array(response.tokens.ids)
        return response is not None

    async def answer(self) -> list[int]:
        while await self.read():
            pass
        return self.ids


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_call_module, "FIRST_BACKOFF_S", 0.0)


async def test_broken_answer_is_sampled_again_before_the_agent_sees_it() -> None:
    """After a loss or an end without a finish reason, a new request id samples from the start."""
    streams = Streams([1, GONE], [2, None], [3, END, None])
    agent = Agent(streams)
    assert await agent.answer() == [3]
    assert agent.retries == 2
    assert len(set(streams.request_ids)) == 3


async def test_partly_streamed_answer_is_not_sampled_again() -> None:
    """The agent has a part of it: another beginning would not fit."""
    agent = Agent(Streams([1, GONE]), streamed=True)
    assert await agent.read()
    with pytest.raises(Unavailable, match="gone"):
        await agent.read()
    assert agent.ids == [1]


async def test_streamed_answer_is_sampled_again_before_its_first_token() -> None:
    """The agent has seen nothing yet."""
    agent = Agent(Streams([GONE], [1, END, None]), streamed=True)
    assert await agent.answer() == [1]


async def test_router_lost_after_the_finish_reason_causes_no_error() -> None:
    """The answer is complete by then."""
    agent = Agent(Streams([1, END, GONE]), streamed=True)
    assert await agent.answer() == [1]


async def test_cancelled_attempt_is_cancelled_at_the_router() -> None:
    """Unread tokens are dropped."""
    streams = Streams([1])
    agent = Agent(streams, streamed=True)
    assert await agent.read()
    streams.say(2)
    agent.call.cancel_attempt()
    assert streams.cancelled == [1]
    assert agent.ids == [1]


async def test_attempts_end_at_the_retry_limit() -> None:
    """The last error is raised."""
    agent = Agent(Streams([GONE]), retry_for_s=0.0)
    with pytest.raises(Unavailable, match="gone"):
        await agent.read()


@pytest.mark.parametrize(
    ("error", "sampled_for_s", "again"),
    [(LOST, 600.0, True), (LOST, 5.0, True), (LOST, 0.0, True), (GONE, 600.0, False)],
)
async def test_long_answer_is_sampled_again(
    monkeypatch: pytest.MonkeyPatch, error: ForgeError, sampled_for_s: float, again: bool
) -> None:
    """The retry time starts when the router is lost, after any time of sampling; not when the
    router itself reports that it waited long enough."""
    now_s = 0.0
    monkeypatch.setattr(sample_call_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    streams = Streams([1], [2, END, None])
    agent = Agent(streams, retry_for_s=30.0)
    assert await agent.read()
    now_s = sampled_for_s
    streams.say(error)
    if again:
        assert await agent.answer() == [2]
    else:
        with pytest.raises(Unavailable, match="gone"):
            await agent.read()


async def test_dead_routers_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lost attempt counts, also one shorter than an attempt with a router."""
    now_s = 0.0
    monkeypatch.setattr(sample_call_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Dead(Streams):
        def send_request(self, *args: Any, **options: Any) -> int:
            nonlocal now_s
            number = super().send_request(*args, **options)
            now_s += 5.0
            self.say(LOST)
            return number

    streams = Dead(*[[] for _ in range(100)])
    agent = Agent(streams, retry_for_s=30.0)
    with pytest.raises(Unavailable, match="lost"):
        await agent.read()
    assert len(streams.request_ids) == 6


async def test_waiting_reader_gets_later_responses() -> None:
    """A response and the end each wake it."""
    streams = Streams([])
    agent = Agent(streams)
    answer = asyncio.create_task(agent.answer())
    for event in (1, 2, END, None):
        await asyncio.sleep(0)
        streams.say(event)
    assert await answer == [1, 2]
