"""Gemini's API: encodes turns as responses, complete or streamed.

Owns the encoding of answers; `history` decodes them when the agent sends them back.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from forge.core.errors import ForgeError
from forge.core.formats import CallDelta, Delta, ReasoningDelta, TextDelta
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import TurnRequest, choices_of
from services.gateway.external.api import ExternalApi
from services.gateway.http.choices import Choice, finish_all, merged
from services.gateway.http.edge import Edge, json_response, sse, stream_events
from services.gateway.http.errors import Failure, google_error
from services.gateway.http.forward import ModelRequest, forward
from services.gateway.http.gemini import schema
from services.gateway.http.gemini.history import messages_of, prefill_of
from services.gateway.http.message_parts.arguments import input_json
from services.gateway.http.openai.responses.tools import count_omitted
from services.gateway.http.request_fields.parameters import decode_request
from services.gateway.sessions import Session
from services.gateway.turns.answer_parser import LikelyToken
from services.gateway.turns.run import Turns
from services.gateway.turns.types import Turn

VERSIONS = ("v1beta", "v1")
"""Versions of the API, which are alike here; clients choose one by themselves."""
Json = dict[str, Any]


class Gemini:
    """`generateContent`, `streamGenerateContent` and `countTokens`."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the routes of generation, streams and token counts."""
        for version in VERSIONS:
            model = f"{prefix}/{version}/models/{{model}}"
            router.add_post(f"{model}:generateContent", self._create)
            router.add_post(f"{model}:streamGenerateContent", self._stream)
            router.add_post(f"{model}:countTokens", self._count)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        if (api := self._external(request)) is not None:
            return await self._forward(request, api, "generateContent")
        claims, asked, headers = await self._asked(request)
        answer, turn = await self._answer(request, claims, asked, headers, stream=False)
        async with self._edge.sessions.use_session(claims) as session:
            return json_response(await answer.complete(session, turn), headers=headers)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if (api := self._external(request)) is not None:
            return await self._forward(request, api, "streamGenerateContent")
        claims, asked, headers = await self._asked(request)
        answer, turn = await self._answer(request, claims, asked, headers, stream=True)
        async with self._edge.sessions.use_session(claims) as session:
            if request.query.get("alt") == "sse":
                return await stream_events(
                    request,
                    _without_comments(answer.events(session, turn)),
                    error_event=_error_event,
                    headers=headers,
                )
            headers["Content-Type"] = "application/json"
            return await stream_events(
                request,
                _array(answer.events(session, turn)),
                error_event=_last_error,
                headers=headers,
            )

    async def _count(self, request: web.Request) -> web.StreamResponse:
        edge = self._edge
        if (api := self._external(request)) is not None:
            return await self._forward(request, api, "countTokens", recorded=False)
        claims = edge.claims(request)
        turns = edge.models.turns(claims, request.match_info["model"])
        asked, headers = decode_request(
            await edge.read_body(request), schema.CountTokensRequest, schema.FIELDS
        )
        _, turn = await self._answer(request, claims, asked.whole, headers, stream=False)
        async with edge.sessions.use_session(claims) as session:
            tokens = await turns.count_prompt_tokens(session, turn)
        details = [{"modality": "TEXT", "tokenCount": tokens}]
        counted = {"totalTokens": tokens, "promptTokensDetails": details}
        return json_response(counted, headers=headers)

    def _external(self, request: web.Request) -> ExternalApi | None:
        """Returns the external API that the path names; None for a model that is served here."""
        found = self._edge.models.find(self._edge.claims(request), request.match_info["model"])
        return found if isinstance(found, ExternalApi) else None

    async def _forward(
        self, request: web.Request, api: ExternalApi, method: str, *, recorded: bool = True
    ) -> web.StreamResponse:
        path = f"/v1beta/models/MODEL:{method}"
        api.target(path)
        arrived, claims = Moment.now(), self._edge.claims(request)
        body = await self._edge.read_body(request)
        call = ModelRequest(http=request, claims=claims, body=body, arrived=arrived)
        return await forward(
            self._edge, call, api, path, error_event=_error_event, recorded=recorded
        )

    async def _asked(
        self, request: web.Request
    ) -> tuple[Claims, schema.GenerateContentRequest, dict[str, str]]:
        claims = self._edge.claims(request)
        self._edge.models.turns(claims, request.match_info["model"])
        body = await self._edge.read_body(request)
        return claims, *decode_request(body, schema.GenerateContentRequest, schema.FIELDS)

    async def _answer(
        self,
        request: web.Request,
        claims: Claims,
        asked: schema.GenerateContentRequest,
        headers: dict[str, str],
        *,
        stream: bool,
    ) -> tuple[GenerateAnswer, TurnRequest]:
        """Returns the answer to be and its turn request."""
        arrived, edge = Moment.now(), self._edge
        config = schema.config_of(asked, headers)
        tools, omitted = schema.tools_of(asked, omit_web_search=edge.omits_web_search)
        headers |= count_omitted(omitted)
        sampling = schema.sampling_of(config)
        sampling.MergeFrom(common_pb2.SamplingParams(grammar=await schema.grammar_of(config)))
        messages, prefill = prefill_of(asked, messages_of(asked, edge.images))
        turns = edge.models.turns(claims, request.match_info["model"])
        model = turns.model
        turn = TurnRequest(
            messages=messages,
            prefill=prefill,
            tools=tools,
            call_tools=schema.calling_of(asked).mode != "NONE",
            required_tool=schema.required_tool(asked, tools, model.format),
            template_kwargs=schema.template_kwargs_of(config, model.template_variables, headers),
            sampling=sampling,
            stop=schema.stops_of(config),
            stream=stream,
            headers=headers,
            arrived=arrived,
        )
        thinking = config.thinking_config
        answer = GenerateAnswer(
            turns=turns,
            model=request.match_info["model"],
            candidates=schema.candidates_of(config),
            thoughts=bool(thinking and thinking.include_thoughts),
            logprobs=bool(config.response_logprobs),
        )
        return answer, turn


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateAnswer:
    """The answer to one request."""

    turns: Turns
    model: str
    candidates: int
    thoughts: bool
    """Thoughts are returned."""
    logprobs: bool
    response_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def complete(self, session: Session, request: TurnRequest) -> Json:
        """Returns the response object."""
        turns = await finish_all(self.turns, session, choices_of(request, self.candidates))
        candidates = [
            self.candidate(index, self._parts(turn)) | self.end_of(turn)
            for index, turn in enumerate(turns)
        ]
        return self.envelope(candidates, usageMetadata=self._usage(turns))

    def events(self, session: Session, request: TurnRequest) -> AsyncGenerator[bytes, None]:
        """Yields the answer as server-sent events."""
        requests = choices_of(request, self.candidates)
        choices = [_Candidate(self, session, one, at) for at, one in enumerate(requests)]
        return merged(choices, end=self._last)

    def envelope(self, candidates: Sequence[Json], **more: Any) -> Json:
        """Returns an object with the fields that all events share."""
        shared = {"modelVersion": self.model, "responseId": self.response_id}
        return {"candidates": list(candidates), **shared, **more}

    def candidate(self, index: int, parts: Sequence[Json]) -> Json:
        """Returns a candidate without end."""
        return {"content": {"role": "model", "parts": list(parts)}, "index": index}

    def parts_of(self, deltas: Sequence[Delta]) -> list[Json]:
        """Returns the parts of new deltas."""
        parts: list[Json] = []
        for delta in deltas:
            match delta:
                case TextDelta(text=text):
                    parts.append({"text": text})
                case ReasoningDelta(text=text) if self.thoughts:
                    parts.append({"text": text, "thought": True})
                case CallDelta():
                    parts.append(_call(delta.call_id, delta.name, delta.arguments))
        return parts

    def end_of(self, turn: Turn) -> Json:
        """Returns the last fields of a candidate."""
        length = turn.sampled.finish_reason == common_pb2.FINISH_REASON_LENGTH
        end: Json = {"finishReason": "MAX_TOKENS" if length else "STOP"}
        if self.logprobs:
            end |= _logprobs(turn)
        return end

    def _parts(self, turn: Turn) -> list[Json]:
        message = turn.said
        parts: list[Json] = []
        if message.reasoning and self.thoughts:
            parts.append({"text": message.reasoning, "thought": True})
        if message.content:
            parts.append({"text": message.content})
        return parts + [
            _call(call.call_id, call.name, call.arguments) for call in message.tool_calls
        ]

    def _last(self, turns: list[Turn]) -> bytes:
        ends = [self.candidate(at, []) | self.end_of(turn) for at, turn in enumerate(turns)]
        return sse(self.envelope(ends, usageMetadata=self._usage(turns)))

    def _usage(self, turns: Sequence[Turn]) -> Json:
        """Returns the usage; thoughts count apart from candidates."""
        prompt = max(turn.prompt_tokens for turn in turns)
        sampled = sum(turn.sampled.tokens for turn in turns)
        thoughts = sum(
            self.turns.model.reasoning_tokens(turn.message, turn.sampled.ids) for turn in turns
        )
        return {
            "promptTokenCount": prompt,
            "candidatesTokenCount": sampled - thoughts,
            "thoughtsTokenCount": thoughts,
            "totalTokenCount": prompt + sampled,
            "cachedContentTokenCount": max(turn.sampled.cached_tokens for turn in turns),
        }


class _Candidate(Choice):
    """The events of one candidate."""

    def __init__(
        self, answer: GenerateAnswer, session: Session, request: TurnRequest, index: int
    ) -> None:
        super().__init__()
        self._answer = answer
        self._session = session
        self._request = request
        self._index = index

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields an event for each piece with new parts."""
        answer = self._answer
        async with aclosing(answer.turns.run_turn(self._session, self._request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Turn):
                    self.turn = piece
                elif parts := answer.parts_of(piece.deltas):
                    yield sse(answer.envelope([answer.candidate(self._index, parts)]))


async def _without_comments(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yields the events; none is an `Ending`, because Google's clients read no comments."""
    async with aclosing(events):
        async for event in events:
            yield bytes(event)


async def _array(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yields the events as the elements of one JSON array."""
    before = b"["
    async with aclosing(events):
        async for event in events:
            yield before + event.removeprefix(b"data: ").rstrip()
            before = b",\n"
        yield b"]"


def _error_event(error: ForgeError) -> bytes:
    return sse(google_error(Failure.of(error)))


def _last_error(error: ForgeError) -> bytes:
    return b",\n" + msgspec.json.encode(google_error(Failure.of(error))) + b"]"


def _call(call_id: str, name: str, arguments: str) -> Json:
    # The model's own spelling, so that no number is rounded before the agent sends it back.
    args = msgspec.Raw(input_json(arguments).encode())
    return {"functionCall": {"id": call_id, "name": name, "args": args}}


def _logprobs(turn: Turn) -> Json:
    tokens = turn.token_logprobs()

    def named(token: LikelyToken) -> Json:
        return {
            "token": token.text,
            "tokenId": token.token_id,
            "logProbability": token.logprob,
        }

    chosen = [named(token.sampled) for token in tokens]
    top = [{"candidates": list(map(named, token.top))} for token in tokens]
    total = sum(token.sampled.logprob for token in tokens)
    return {
        "avgLogprobs": total / len(tokens) if tokens else 0.0,
        "logprobsResult": {"chosenCandidates": chosen, "topCandidates": top},
    }
