"""OpenAI's Responses API: creates, retrieves and deletes responses.

Owns the steps of a request: its conversation, the turn, the answer, complete or streamed. The
conversation of a `previous_response_id` comes from the session's own turns. So it lives as long as
the session, in any gateway, and is unknown in other sessions.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from forge.core.conversation.messages import Message
from forge.core.errors import ContextTooLong, ForgeError, InvalidArgument, ResourceExhausted
from forge.core.token_columns import TOKEN_BYTES
from forge.v1 import common_pb2
from services.gateway.actors.session import Forget, Recall
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.handles import Handle, Recalled, deletion
from services.gateway.conversation.prefix_match import NamedPrefix
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.errors import UnknownPreviousResponse, UnknownResponse
from services.gateway.http import request_body
from services.gateway.http.edge import Edge, json_response, stream_events, typed_sse
from services.gateway.http.errors import Failure
from services.gateway.http.openai import responses_schema
from services.gateway.http.openai.chat import token_logprobs
from services.gateway.http.openai.responses_events import Event, Events
from services.gateway.http.openai.responses_history import history_of, items_of, messages_of
from services.gateway.http.openai.responses_items import (
    Head,
    Item,
    ending,
    key_of_item,
    output_of,
    response_key,
    usage,
    with_logprobs,
)
from services.gateway.http.openai.responses_schema import LOGPROBS, ResponsesRequest
from services.gateway.http.openai.responses_tools import (
    ToolName,
    count_omitted,
    responses_tools,
    tool_set,
)
from services.gateway.model.chat_model import ChatModel
from services.gateway.sessions import Session
from services.gateway.turns.run import ASK_TIMEOUT_S, Turns
from services.gateway.turns.types import Turn


class Responses:
    """The endpoints below `/v1/responses`."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """As `Endpoints.add_routes`."""
        router.add_post(f"{prefix}/v1/responses", self._create)
        router.add_get(f"{prefix}/v1/responses/{{response}}", self._retrieve)
        router.add_delete(f"{prefix}/v1/responses/{{response}}", self._delete)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        arrived = Moment.now()
        edge = self._edge
        claims = edge.claims(request)
        asked = request_body.decode(await edge.read_body(request), ResponsesRequest)
        edge.check_model(asked.model)
        head, turn = _head_and_turn(
            asked, edge.turns.model, arrived, omit_web_search=edge.omits_web_search
        )
        grammar = await responses_schema.answer_grammar_of(asked)
        turn.sampling.MergeFrom(common_pb2.SamplingParams(grammar=grammar))
        async with edge.sessions.use_session(claims) as session:
            response = Response(
                turns=edge.turns,
                session=session,
                request=replace(turn, messages=await _history(session, asked, edge)),
                head=head,
                logprobs=bool(asked.top_logprobs) or LOGPROBS in (asked.include or ()),
            )
            if not turn.stream:
                return json_response(await response.complete(), headers=turn.headers)
            events = Events(head)
            return await stream_events(
                request,
                response.events(events),
                error_event=lambda error: b"".join(map(typed_sse, _failure(events, error))),
                headers=turn.headers,
            )

    async def _retrieve(self, request: web.Request) -> web.Response:
        if request.query.get("stream") == "true":
            raise InvalidArgument("stream is not supported: a stored response is complete")
        response_id = request.match_info["response"]
        async with self._edge.sessions.use_session(self._edge.claims(request)) as session:
            recalled = await _recall(session, response_key(response_id))
            if recalled is None:
                raise UnknownResponse(f"Response with id {response_id[:100]!r} not found.")
            return json_response(
                _stored(recalled, response_key(response_id), self._edge.turns.model)
            )

    async def _delete(self, request: web.Request) -> web.Response:
        response_id = request.match_info["response"]
        name = response_key(response_id)
        claims = self._edge.claims(request)
        async with self._edge.sessions.use_session(claims) as session:
            if await _recall(session, name) is None:
                raise UnknownResponse(f"Response with id {response_id[:100]!r} not found.")
            await self._edge.pool.annotate(claims, [deletion(name)])
            await session.actor.ask(Forget(name=name), timeout_s=ASK_TIMEOUT_S)
        return json_response({"id": response_id, "object": "response", "deleted": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The response to one request."""

    turns: Turns
    session: Session
    request: TurnRequest
    head: Head
    logprobs: bool

    async def complete(self) -> dict[str, Any]:
        """Returns the response object."""
        turn = await self.turns.finish_turn(self.session, self.request)
        status, details = ending(turn.sampled.finish_reason)
        output = with_logprobs(output_of(self.head, turn.message, status), self._logprobs(turn))
        return self.head.response(status, output, usage=self._usage(turn), **details)

    async def events(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Yields the response as server-sent events. The first event comes with the first token, so
        an earlier error still gets its HTTP status; only a prompt that is too long is an event, as
        in OpenAI's API, because clients look for its code there."""
        begun = False
        try:
            async with aclosing(self.turns.run_turn(self.session, self.request)) as pieces:
                async for piece in pieces:
                    if not begun:
                        begun = True
                        for event in events.start():
                            yield typed_sse(event)
                    if isinstance(piece, Turn):
                        new = self._end(events, piece)
                    else:
                        new = events.add_deltas(piece.deltas)
                    for event in new:
                        yield typed_sse(event)
        except ContextTooLong as error:
            for event in events.refuse(Failure.of(error).code, str(error)):
                yield typed_sse(event)

    def _end(self, events: Events, turn: Turn) -> Iterator[Event]:
        status, details = ending(turn.sampled.finish_reason)
        return events.finish(status, self._usage(turn), details, self._logprobs(turn))

    def _usage(self, turn: Turn) -> dict[str, Any]:
        return usage(
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.sampled.cached_tokens,
            sampled_tokens=turn.sampled.tokens,
            reasoning_tokens=self.turns.model.reasoning_tokens(turn.message, turn.sampled.ids),
        )

    def _logprobs(self, turn: Turn) -> list[dict[str, Any]]:
        return token_logprobs(turn) if self.logprobs else []


def _head_and_turn(
    asked: ResponsesRequest,
    model: ChatModel,
    arrived: Moment,
    *,
    omit_web_search: bool = False,
) -> tuple[Head, TurnRequest]:
    """Returns the head of the response, and the turn request without its messages."""
    responses_schema.check(asked)
    asked_tools = tool_set(asked.tools, omit_web_search=omit_web_search)
    tools, names = asked_tools.tools, asked_tools.names
    wanted = responses_schema.wanted_tool(asked)
    key = uuid.uuid4().hex
    echoed = responses_schema.echoed(asked)
    head = Head(
        key=key,
        created_at=arrived.unix_s,
        model=model.name,
        instructions=asked.instructions,
        tools=responses_tools(tools, names),
        names=names,
        echoed=echoed,
    )
    facts = {
        "created_at": arrived.unix_s,
        "instructed": bool(asked.instructions),
        "echoed": responses_schema.remembered(echoed),
        "names": {flat: [name.name, name.namespace, name.custom] for flat, name in names.items()},
    }
    sampling = request_body.sampling_params(
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        max_tokens_name="max_output_tokens",
    )
    sampling.top_logprobs = request_body.top_logprobs_of(asked.top_logprobs)
    turn = TurnRequest(
        tools=tools,
        call_tools=asked.tool_choice != "none",
        required_tool=None
        if wanted is None
        else request_body.tool_to_call(wanted, tools, model.format),
        sampling=sampling,
        parallel_calls=asked.parallel_tool_calls is not False,
        handle=None if asked.store is False else Handle(name=key, facts=facts),
        stream=bool(asked.stream),
        headers=count_omitted(asked_tools.omitted),
        arrived=arrived,
    )
    return head, turn


async def _history(session: Session, asked: ResponsesRequest, edge: Edge) -> Sequence[Message]:
    """Returns the complete conversation: instructions, earlier messages, new messages."""
    raw = bytes(asked.input)
    if not asked.previous_response_id and b"item_reference" not in raw:
        return history_of(raw, asked.instructions, edge.images)
    items = await _dereferenced(session, items_of(raw), edge.turns.model)
    new = messages_of(items, edge.images)
    before: Sequence[Message] = ()
    if asked.previous_response_id:
        recalled = await _recall(session, response_key(asked.previous_response_id))
        if recalled is None:
            raise UnknownPreviousResponse(
                f"Previous response with id {asked.previous_response_id[:100]!r} not found."
            )
        if _instructions(recalled) == (asked.instructions or None):
            return NamedPrefix(recalled.node, new)
        # Instructions apply to one response only; each request sends its own.
        before = recalled.node.messages()[int(recalled.turn.facts["instructed"]) :]
    instructions = (
        [Message(role="system", content=asked.instructions)] if asked.instructions else []
    )
    return [*instructions, *before, *new]


async def _dereferenced(
    session: Session, items: str | Sequence[Item], model: ChatModel
) -> str | list[Item]:
    """Replaces every `item_reference` of the input by the output item with its id."""
    if isinstance(items, str):
        return items
    outputs: dict[str, dict[str, Item]] = {}
    dereferenced = []
    for at, item in enumerate(items):
        if item.get("type") == "item_reference":
            item_id = str(item.get("id"))
            key = key_of_item(item_id) or ""
            if key not in outputs:
                recalled = await _recall(session, key)
                output = _stored(recalled, key, model)["output"] if recalled else ()
                outputs[key] = {kept["id"]: kept for kept in output}
            if item_id not in outputs[key]:
                raise InvalidArgument(f"input[{at}]: item with id {item_id[:100]!r} not found")
            item = outputs[key][item_id]
        dereferenced.append(item)
    return dereferenced


async def _recall(session: Session, key: str) -> Recalled | None:
    recall = Recall(name=key)
    recalled: Recalled | None = await session.actor.ask(recall, timeout_s=ASK_TIMEOUT_S)
    return recalled


def _instructions(recalled: Recalled) -> str | None:
    """Returns the instructions of a response."""
    instructed = recalled.turn.facts["instructed"]
    return recalled.node.messages()[0].content if instructed else None


def _stored(recalled: Recalled, key: str, model: ChatModel) -> dict[str, Any]:
    """Returns the response object of an earlier turn."""
    turn, answer = recalled.turn, recalled.node.messages()[-1]
    # Turns of earlier releases have no names.
    names = {
        flat: ToolName(name=name, namespace=namespace, custom=custom)
        for flat, (name, namespace, custom) in turn.facts.get("names", {}).items()
    }
    head = Head(
        key=key,
        created_at=turn.facts["created_at"],
        model=model.name,
        instructions=_instructions(recalled),
        tools=responses_tools(recalled.tools, names),
        names=names,
        echoed=turn.facts["echoed"],
    )
    status, details = ending(turn.finish_reason)
    spent = usage(
        prompt_tokens=recalled.prompt_tokens,
        cached_tokens=turn.cached_tokens,
        sampled_tokens=len(recalled.sampled_ids) // TOKEN_BYTES,
        reasoning_tokens=model.reasoning_tokens(answer, recalled.sampled_ids),
    )
    return head.response(status, output_of(head, answer, status), usage=spent, **details)


def _failure(events: Events, error: ForgeError) -> Iterator[Event]:
    limited = isinstance(error, ResourceExhausted)
    return events.fail("rate_limit_exceeded" if limited else "server_error", str(error))
