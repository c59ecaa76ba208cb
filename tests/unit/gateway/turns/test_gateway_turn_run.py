"""The order of one turn, for calls that end before their answers."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge.core.errors import DeadlineExceeded
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, inference_pb2
from services.gateway import sessions
from services.gateway.actors.messages import BeginCall, EndCall
from services.gateway.config import SamplingBounds
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.prompt import Prompt, given
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.errors import SessionClosed
from services.gateway.router.sample_call import SampleCall
from services.gateway.turns import record
from services.gateway.turns.run import Turns
from services.gateway.turns.types import Turn
from tests.support.gateway.chat_templates import make_model
from tests.support.runtime.waiting import until


class Session:
    """A session that closes once its call's answer is waited for."""

    def __init__(self) -> None:
        self.claims = Claims(subject="t:0:0", scopes=frozenset({"session"}), trajectory_id="t:0:0")
        self.ended: list[EndCall] = []
        self.abort: Any = None
        self.actor = self

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        if isinstance(message, BeginCall):
            self.abort = message.abort
            return Prompt(ids=message.request.prompt_ids, draft=given(message.request.prompt_ids))
        self.tell(message)
        return len(self.ended) - 1

    def tell(self, message: EndCall) -> None:
        self.ended.append(message)


class Stream:
    """A router that has said so many tokens when the session closes."""

    def __init__(self, session: Session, said: int) -> None:
        self._session = session
        self._said = said
        self.cancelled: list[int] = []

    async def pick_stream(self, *, timeout_s: float) -> Stream:
        return self

    def send_request(self, request: Any, receiver: SampleCall, *, timeout_s: float) -> int:
        if self._said:
            receiver.on_response(inference_pb2.SampleResponse(tokens=tokens(self._said)))
        asyncio.get_running_loop().call_soon(self._after_first_read, receiver)
        return 1

    def _after_first_read(self, receiver: SampleCall) -> None:
        self._session.abort()

    def cancel_request(self, number: int) -> None:
        self.cancelled.append(number)


def tokens(count: int) -> common_pb2.SampledTokens:
    return common_pb2.SampledTokens(
        ids=int32_bytes([5] * count),
        weight_versions=int32_bytes([1] * count),
        logprobs=float32_bytes([-0.5] * count),
    )


@pytest.mark.parametrize("said", [0, 3])
async def test_call_ended_by_a_close_records_its_sampled_tokens(said: int) -> None:
    """Without tokens there is no turn; the agent learns that the session closed."""
    session = Session()
    turns = Turns(
        make_model("chatml"),
        cast(Any, SimpleNamespace(count_call=lambda _: nullcontext())),
        cast(Any, Stream(session, said)),
        sample_timeout_s=30.0,
        retry_for_s=30.0,
        bounds=SamplingBounds(),
    )
    request = TurnRequest(
        prompt_ids=int32_bytes([1, 2]),
        sampling=common_pb2.SamplingParams(max_tokens=9),
        stream=True,
        arrived=Moment.now(),
    )
    with pytest.raises(SessionClosed):
        async for _ in turns.run_turn(cast(Any, session), request):
            pass
    (end,) = session.ended
    # The record takes the sampling settings from the request.
    assert end.request is request
    if not said:
        assert end.sampled is None
    else:
        assert end.sampled is not None
        assert end.sampled.ids == int32_bytes([5] * said)
        assert end.sampled.finish_reason == common_pb2.FINISH_REASON_ABORTED


class AskedStream(Stream):
    """A router that notes what it is asked."""

    asked: inference_pb2.SampleRequest

    def send_request(self, request: Any, receiver: SampleCall, *, timeout_s: float) -> int:
        self.asked = request
        return super().send_request(request, receiver, timeout_s=timeout_s)


@pytest.mark.parametrize("record_experts", [False, True])
async def test_setting_alone_asks_for_experts(record_experts: bool) -> None:
    """From the first token of a new context on; what the agent sets does not count."""
    session = Session()
    stream = AskedStream(session, 1)
    turns = Turns(
        make_model("chatml"),
        cast(Any, SimpleNamespace(count_call=lambda _: nullcontext())),
        cast(Any, stream),
        sample_timeout_s=30.0,
        retry_for_s=30.0,
        bounds=SamplingBounds(),
        record_experts=record_experts,
    )
    request = TurnRequest(
        prompt_ids=int32_bytes([1, 2]),
        sampling=common_pb2.SamplingParams(max_tokens=9, routes_from=1),
        stream=True,
        arrived=Moment.now(),
    )
    with pytest.raises(SessionClosed):
        async for _ in turns.run_turn(cast(Any, session), request):
            pass
    assert stream.asked.sampling.HasField("routes_from") == record_experts
    assert stream.asked.sampling.routes_from == 0


class TalkativeStream(Stream):
    """A router that samples on behind a stop string."""

    def _after_first_read(self, receiver: SampleCall) -> None:
        receiver.on_response(inference_pb2.SampleResponse(tokens=tokens(3)))


class NotingSession(Session):
    """Notes the requests that were cancelled before the record."""

    stream: Stream
    cancelled_at_record: list[int]

    def tell(self, message: EndCall) -> None:
        super().tell(message)
        self.cancelled_at_record = list(self.stream.cancelled)


async def test_stop_string_cancels_sampling() -> None:
    """Tokens behind a stop string are not read; the router gets a cancel before the record."""
    session = NotingSession()
    session.stream = stream = TalkativeStream(session, 3)
    model = make_model("chatml")
    turns = Turns(
        model,
        cast(Any, SimpleNamespace(count_call=lambda _: nullcontext())),
        cast(Any, stream),
        sample_timeout_s=30.0,
        retry_for_s=30.0,
        bounds=SamplingBounds(),
    )
    request = TurnRequest(
        prompt_ids=int32_bytes([1, 2]),
        sampling=common_pb2.SamplingParams(max_tokens=9),
        stop=(model.piece(5) * 2,),
        stream=True,
        arrived=Moment.now(),
    )
    turn = [event async for event in turns.run_turn(cast(Any, session), request)][-1]
    assert isinstance(turn, Turn)
    assert turn.sampled.ids == int32_bytes([5, 5])
    assert turn.sampled.finish_reason == common_pb2.FINISH_REASON_STOP
    assert session.cancelled_at_record == [1]


class NoRouter:
    """Routers of which there is none."""

    def __init__(self) -> None:
        self.looked_for = asyncio.Event()

    async def pick_stream(self, *, timeout_s: float) -> Stream:
        self.looked_for.set()
        await asyncio.Event().wait()
        raise AssertionError("waited forever")


async def test_close_does_not_wait_for_a_router() -> None:
    """An abort ends the search for a router; no request is sent after it."""
    streams = NoRouter()
    call = SampleCall(cast(Any, streams), timeout_s=30.0, retry_for_s=30.0)
    reading = asyncio.create_task(call.read_response())
    await streams.looked_for.wait()
    call.abort()
    assert await reading is None
    streams.looked_for.clear()
    later = SampleCall(cast(Any, streams), timeout_s=30.0, retry_for_s=30.0)
    later.abort()
    assert await later.read_response() is None
    assert not streams.looked_for.is_set()


class Busy(Actor):
    """A session that encodes a long prompt when the end of another call comes."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.handled: list[object] = []

    async def receive(self, message: Any) -> Any:
        await self.idle.wait()
        self.handled.append(message)
        return len(self.handled) - 1


async def test_busy_session_records_the_end_of_a_call_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has seen the tokens, and a close waits for each call that has begun."""
    monkeypatch.setattr(record, "ASK_TIMEOUT_S", 0.01)
    system, busy = ActorSystem("test"), Busy()
    actor = await system.spawn(lambda: busy, name="session")
    session = cast(sessions.Session, SimpleNamespace(actor=actor, claims=Session().claims))
    request = TurnRequest(
        prompt_ids=int32_bytes([1]), sampling=common_pb2.SamplingParams(), arrived=Moment.now()
    )
    end = EndCall(call_id="call", request=request, prompt=None, sampled=None)
    actor.tell("a long prompt")
    with pytest.raises(DeadlineExceeded, match="did not record the turn"):
        await record.record_end(session, end)
    busy.idle.set()
    await until(lambda: len(busy.handled) == 2)
    assert busy.handled[1] is end
    await system.stop()
