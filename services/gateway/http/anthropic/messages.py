"""Anthropic's Messages API: encodes turns as responses, complete or streamed.

Owns the encoding of answers; `history` decodes them when the agent sends them back.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from forge.core.formats import CallDelta, Delta, ReasoningDelta, TextDelta
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.http.anthropic import schema
from services.gateway.http.anthropic.history import messages_of, prefill_of
from services.gateway.http.anthropic.schema import Shown
from services.gateway.http.edge import Endpoints, json_response, stream_events, typed_sse
from services.gateway.http.errors import REQUEST_ID, Failure, anthropic_error
from services.gateway.http.forward import ErrorEvent, ModelRequest, served_or_forwarded
from services.gateway.http.message_parts.arguments import input_json
from services.gateway.http.request_fields.parameters import decode_request
from services.gateway.sessions import Session
from services.gateway.turns.run import Turns
from services.gateway.turns.types import Turn

Event = dict[str, Any]

SIGNATURE = "forge"
"""Signature of every thinking block. It is not verified: edited thinking makes a branch, like any
other edit."""
PING_EVERY_S = 15.0
"""Interval of pings while a tool call is sampled, which is sent only when complete."""


class AnthropicMessages(Endpoints):
    """`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the routes of messages and of token counts."""
        edge, path = self._edge, "/v1/messages"
        create = served_or_forwarded(edge, path, self._create, error_events=_error_event)
        router.add_post(f"{prefix}{path}", create)
        path = "/v1/messages/count_tokens"
        count = served_or_forwarded(edge, path, self._count, recorded=False)
        router.add_post(f"{prefix}{path}", count)

    async def _create(self, request: ModelRequest) -> web.StreamResponse:
        edge, claims = self._edge, request.claims
        asked, headers = decode_request(request.body, schema.MessagesRequest, schema.FIELDS)
        turns = edge.models.turns(claims, asked.model)
        sampling = schema.sampling_of(asked)
        sampling.MergeFrom(common_pb2.SamplingParams(grammar=await schema.grammar_of(asked)))
        turn = self._turn(
            asked,
            turns,
            sampling=sampling,
            stop=schema.stops_of(asked),
            stream=bool(asked.stream),
            arrived=request.arrived,
            headers=headers,
        )
        async with edge.sessions.use_session(claims) as session:
            answer = MessagesAnswer(
                turns=turns,
                session=session,
                request=turn,
                shown=schema.shown_of(asked),
                model=asked.model,
            )
            if not turn.stream:
                return json_response(await answer.complete(), headers=turn.headers)
            return await stream_events(
                request.http,
                answer.events(),
                error_event=_error_event(request.http),
                headers=turn.headers,
            )

    async def _count(self, request: ModelRequest) -> web.StreamResponse:
        edge, claims = self._edge, request.claims
        asked, headers = decode_request(
            request.body, schema.CountTokensRequest, schema.COUNT_FIELDS
        )
        turns = edge.models.turns(claims, asked.model)
        sampling = common_pb2.SamplingParams()
        turn = self._turn(asked, turns, arrived=request.arrived, sampling=sampling, headers=headers)
        async with edge.sessions.use_session(claims) as session:
            tokens = await turns.count_prompt_tokens(session, turn)
            return json_response({"input_tokens": tokens}, headers=headers)

    def _turn(
        self,
        asked: schema.CountTokensRequest,
        turns: Turns,
        *,
        arrived: Moment,
        sampling: common_pb2.SamplingParams,
        headers: dict[str, str],
        stop: Sequence[str] = (),
        stream: bool = False,
    ) -> TurnRequest:
        schema.check(asked)
        tools = schema.tools_of(asked)
        messages, prefill = prefill_of(asked, messages_of(asked, self._edge.images))
        return TurnRequest(
            messages=messages,
            prefill=prefill,
            headers=headers,
            tools=tools,
            call_tools=schema.calls_tools(asked),
            parallel_calls=schema.parallel_calls(asked),
            required_tool=schema.required_tool(asked, tools, turns.model.format),
            sampling=sampling,
            stop=stop,
            stream=stream,
            arrived=arrived,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesAnswer:
    """The answer to one request."""

    turns: Turns
    session: Session
    request: TurnRequest
    shown: Shown
    model: str
    """Name of the model in the request, and in the answer."""
    message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    @property
    def _context_tokens(self) -> int:
        return self.turns.context_limit(self.session.claims)

    async def complete(self) -> dict[str, Any]:
        """Returns the message object."""
        turn = await self.turns.finish_turn(self.session, self.request)
        return self._message(
            content=content_of(turn, self.shown),
            **ending(turn, self._context_tokens),
            usage=self._usage(turn),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the answer as server-sent events."""
        blocks = Blocks(self.shown)
        sent_s: float | None = None
        async with aclosing(self.turns.run_turn(self.session, self.request)) as run:
            async for event in run:
                if isinstance(event, Turn):
                    for last in (*blocks.finish(), *self._end(event)):
                        yield typed_sse(last)
                    return
                new = [made for delta in event.deltas for made in blocks.add_delta(delta)]
                if sent_s is None:
                    new = [*self._start(event.prompt_tokens), *new]
                elif not new and time.monotonic() >= sent_s + PING_EVERY_S:
                    new = [{"type": "ping"}]
                for made in new:
                    yield typed_sse(made)
                if new:
                    sent_s = time.monotonic()

    def _start(self, prompt_tokens: int) -> Iterator[Event]:
        # The number of cached tokens is known, and sent, only at the end.
        usage = {
            "input_tokens": prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = self._message(content=[], stop_reason=None, stop_sequence=None, usage=usage)
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def _end(self, turn: Turn) -> Iterator[Event]:
        yield {
            "type": "message_delta",
            "delta": ending(turn, self._context_tokens),
            "usage": self._usage(turn),
        }
        yield {"type": "message_stop"}

    def _message(self, **fields: Any) -> dict[str, Any]:
        head = {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
        }
        return head | fields

    def _usage(self, turn: Turn) -> dict[str, Any]:
        """Returns Anthropic's usage, whose `input_tokens` exclude cached tokens."""
        sampled = turn.sampled
        thinking = self.turns.model.reasoning_tokens(turn.message, sampled.ids)
        return {
            "input_tokens": turn.prompt_tokens - sampled.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": sampled.cached_tokens,
            "output_tokens": sampled.tokens,
            "output_tokens_details": {"thinking_tokens": thinking},
        }


class Blocks:
    """Events of a streamed message's content; at most one block is open."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._index = -1
        self._open = ""
        """Type of the open block; "" if none."""

    def add_delta(self, delta: Delta) -> Iterator[Event]:
        """Yields the events of a delta."""
        match delta:
            case TextDelta(text=text):
                yield from self._into("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text=text) if self._shown is not Shown.NOTHING:
                yield from self._into("thinking", _thinking("", ""))
                if self._shown is Shown.TEXT:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallDelta(name=name, arguments=arguments, call_id=call_id):
                yield from self.finish()
                yield from self._into("tool_use", _tool_use(call_id, name, {}))
                part = input_json(arguments)
                yield self._delta({"type": "input_json_delta", "partial_json": part})
                yield from self.finish()

    def finish(self) -> Iterator[Event]:
        """Closes the open block."""
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""

    def _into(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self.finish()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def content_of(turn: Turn, shown: Shown) -> list[dict[str, Any]]:
    """Returns the blocks of a complete answer: thinking, text, calls."""
    message = turn.said
    blocks: list[dict[str, Any]] = []
    if message.reasoning and shown is not Shown.NOTHING:
        text = message.reasoning if shown is Shown.TEXT else ""
        blocks.append(_thinking(text, SIGNATURE))
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        # The model's own spelling, so that no number is rounded before the agent sends it back.
        arguments = msgspec.Raw(input_json(call.arguments).encode())
        blocks.append(_tool_use(call.call_id, call.name, arguments))
    return blocks


def ending(turn: Turn, context_tokens: int) -> dict[str, Any]:
    """Returns the stop reason and the stop sequence."""
    stop_sequence = None
    if turn.sampled.finish_reason == common_pb2.FINISH_REASON_LENGTH:
        full = turn.prompt_tokens + turn.sampled.tokens >= context_tokens
        reason = "model_context_window_exceeded" if full else "max_tokens"
    elif turn.stop_text:
        reason, stop_sequence = "stop_sequence", turn.stop_text
    else:
        reason = "tool_use" if turn.message.tool_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop_sequence}


def _error_event(request: web.Request) -> ErrorEvent:
    return lambda error: typed_sse(anthropic_error(Failure.of(error), request[REQUEST_ID]))


def _thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
