"""One response: its turn, as an object or as events.

Owns the conversion of a request to a turn, and of the turn to a response. Owns no transport:
`responses` is HTTP, `socket` WebSocket.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from forge.core.errors import ContextTooLong, ForgeError, ResourceExhausted
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.handles import Handle
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.http.edge import Edge
from services.gateway.http.errors import Failure
from services.gateway.http.openai.completions.chat import token_logprobs
from services.gateway.http.openai.responses import schema as responses_schema
from services.gateway.http.openai.responses.events import Event, Events
from services.gateway.http.openai.responses.items import (
    Head,
    ending,
    output_of,
    usage,
    with_logprobs,
)
from services.gateway.http.openai.responses.recall import conversation_of
from services.gateway.http.openai.responses.schema import LOGPROBS, ResponsesRequest
from services.gateway.http.openai.responses.tools import count_omitted, responses_tools, tool_set
from services.gateway.http.request_fields import request_body
from services.gateway.model.chat_model import ChatModel
from services.gateway.sessions import Session
from services.gateway.turns.run import Turns
from services.gateway.turns.types import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request that was checked; its conversation is still to be read."""

    asked: ResponsesRequest
    turns: Turns
    head: Head
    turn: TurnRequest

    async def response(
        self, edge: Edge, session: Session, *, known: Collection[str] = ()
    ) -> Response:
        """Returns the response; raises the errors of `conversation_of`."""
        asked = self.asked
        messages = await conversation_of(session, asked, edge, known=known)
        return Response(
            turns=self.turns,
            session=session,
            request=replace(self.turn, messages=messages),
            head=self.head,
            logprobs=bool(asked.top_logprobs) or LOGPROBS in (asked.include or ()),
        )


async def draft_of(
    asked: ResponsesRequest,
    edge: Edge,
    claims: Claims,
    arrived: Moment,
    headers: dict[str, str],
    *,
    names_all: bool = False,
) -> CheckedRequest:
    """Checks a request. `headers`: those of its response so far. `names_all`: also a response that
    is not stored gets a name. Raises `UnknownModel`, `ModelNotAllowed`, `InvalidArgument`."""
    turns = edge.models.turns(claims, asked.model)
    head, turn = head_and_turn(
        asked,
        turns.model,
        arrived,
        headers,
        omit_web_search=edge.omits_web_search,
        names_all=names_all,
    )
    grammar = await responses_schema.answer_grammar_of(asked)
    turn.sampling.MergeFrom(common_pb2.SamplingParams(grammar=grammar))
    return CheckedRequest(asked=asked, turns=turns, head=head, turn=turn)


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

    async def events(self, events: Events) -> AsyncGenerator[Event, None]:
        """Yields the response's events. The first one comes with the first token, so an earlier
        error is raised; only a prompt that is too long is an event, as in OpenAI's API, because
        clients look for its code there."""
        begun = False
        try:
            async with aclosing(self.turns.run_turn(self.session, self.request)) as pieces:
                async for piece in pieces:
                    if not begun:
                        begun = True
                        for event in events.start():
                            yield event
                    if isinstance(piece, Turn):
                        new = self._end(events, piece)
                    else:
                        new = events.add_deltas(piece.deltas)
                    for event in new:
                        yield event
        except ContextTooLong as error:
            for event in events.refuse(Failure.of(error, prompt="input")):
                yield event

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


def failure_events(events: Events, error: ForgeError) -> Iterator[Event]:
    """Returns the last events of a response that failed after its first token."""
    if isinstance(error, ResourceExhausted):
        return events.fail("rate_limit_exceeded", str(error), kind="rate_limit_error")
    return events.fail("server_error", str(error))


def head_and_turn(
    asked: ResponsesRequest,
    model: ChatModel,
    arrived: Moment,
    headers: dict[str, str],
    *,
    omit_web_search: bool = False,
    names_all: bool = False,
) -> tuple[Head, TurnRequest]:
    """Returns the head of the response, and the turn request without its messages."""
    responses_schema.check(asked)
    asked_tools = tool_set(asked.tools, omit_web_search=omit_web_search)
    tools, names = asked_tools.tools, asked_tools.names
    head = Head(
        key=uuid.uuid4().hex,
        created_at=arrived.unix_s,
        model=asked.model,
        instructions=asked.instructions,
        tools=responses_tools(tools, names),
        names=names,
        echoed=responses_schema.echoed(asked),
    )
    sampling = _sampling(asked)
    wanted = responses_schema.wanted_tool(asked)
    stored = asked.store is not False
    headers |= count_omitted(asked_tools.omitted)
    turn = TurnRequest(
        tools=tools,
        call_tools=asked.tool_choice != "none",
        required_tool=None
        if wanted is None
        else request_body.tool_to_call(wanted, tools, model.format),
        sampling=sampling,
        parallel_calls=asked.parallel_tool_calls is not False,
        handle=_handle(head, stored=stored) if stored or names_all else None,
        stream=bool(asked.stream),
        template_kwargs=responses_schema.template_kwargs_of(
            asked, model.template_variables, headers
        ),
        headers=headers,
        arrived=arrived,
    )
    return head, turn


def _sampling(asked: ResponsesRequest) -> common_pb2.SamplingParams:
    sampling = request_body.sampling_params(
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        max_tokens_name="max_output_tokens",
    )
    sampling.top_logprobs = request_body.top_logprobs_of(asked.top_logprobs)
    return sampling


def _handle(head: Head, *, stored: bool) -> Handle:
    facts: dict[str, Any] = {
        "created_at": head.created_at,
        "model": head.model,
        "instructed": bool(head.instructions),
        "echoed": responses_schema.remembered(head.echoed),
    }
    if head.names:
        facts["names"] = {
            flat: [tool.name, tool.namespace, tool.custom] for flat, tool in head.names.items()
        }
    if not stored:
        facts["stored"] = False
    return Handle(name=head.key, facts=facts)
