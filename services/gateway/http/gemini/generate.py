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
from forge.v1 import common_pb2
from services.gateway.conversation.turn_request import TurnRequest, choices_of
from services.gateway.http.choices import Choice, finish_all, merged
from services.gateway.http.edge import Endpoints, json_response, sse, stream_events
from services.gateway.http.errors import Failure, google_error
from services.gateway.http.forward import ModelRequest, served_or_forwarded
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


class Gemini(Endpoints):
    """`generateContent`, `streamGenerateContent` and `countTokens`."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the routes of generation, streams and token counts."""
        for method, serve in (
            ("generateContent", self._create),
            ("streamGenerateContent", self._stream),
            ("countTokens", self._count),
        ):
            handler = served_or_forwarded(
                self._edge,
                f"/v1beta/models/MODEL:{method}",
                serve,
                error_events=lambda _: _error_event,
                recorded=method != "countTokens",
            )
            for version in VERSIONS:
                router.add_post(f"{prefix}/{version}/models/{{model}}:{method}", handler)

    async def _create(self, request: ModelRequest) -> web.StreamResponse:
        asked, headers = decode_request(request.body, schema.GenerateContentRequest, schema.FIELDS)
        answer, turn = await self._answer(request, asked, headers, stream=False)
        async with self._edge.sessions.use_session(request.claims) as session:
            return json_response(await answer.complete(session, turn), headers=headers)

    async def _stream(self, request: ModelRequest) -> web.StreamResponse:
        asked, headers = decode_request(request.body, schema.GenerateContentRequest, schema.FIELDS)
        answer, turn = await self._answer(request, asked, headers, stream=True)
        async with self._edge.sessions.use_session(request.claims) as session:
            if request.http.query.get("alt") == "sse":
                return await stream_events(
                    request.http,
                    _without_comments(answer.events(session, turn)),
                    error_event=_error_event,
                    headers=headers,
                )
            headers["Content-Type"] = "application/json"
            return await stream_events(
                request.http,
                _array(answer.events(session, turn)),
                error_event=_last_error,
                headers=headers,
            )

    async def _count(self, request: ModelRequest) -> web.StreamResponse:
        asked, headers = decode_request(request.body, schema.CountTokensRequest, schema.FIELDS)
        answer, turn = await self._answer(request, asked.whole, headers, stream=False)
        async with self._edge.sessions.use_session(request.claims) as session:
            tokens = await answer.turns.count_prompt_tokens(session, turn)
        details = [{"modality": "TEXT", "tokenCount": tokens}]
        counted = {"totalTokens": tokens, "promptTokensDetails": details}
        return json_response(counted, headers=headers)

    async def _answer(
        self,
        request: ModelRequest,
        asked: schema.GenerateContentRequest,
        headers: dict[str, str],
        *,
        stream: bool,
    ) -> tuple[GenerateAnswer, TurnRequest]:
        """Returns the answer to be and its turn request."""
        edge, name = self._edge, request.http.match_info["model"]
        config = schema.config_of(asked, headers)
        tools, omitted = schema.tools_of(asked, omit_web_search=edge.omits_web_search)
        headers |= count_omitted(omitted)
        sampling = schema.sampling_of(config)
        sampling.MergeFrom(common_pb2.SamplingParams(grammar=await schema.grammar_of(config)))
        messages, prefill = prefill_of(asked, messages_of(asked, edge.images))
        turns = edge.models.turns(request.claims, name)
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
            arrived=request.arrived,
        )
        thinking = config.thinking_config
        answer = GenerateAnswer(
            turns=turns,
            model=name,
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


@dataclass(slots=True)
class _Candidate(Choice):
    """The events of one candidate."""

    answer: GenerateAnswer
    session: Session
    request: TurnRequest
    index: int

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields an event for each piece with new parts."""
        answer = self.answer
        async with aclosing(answer.turns.run_turn(self.session, self.request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Turn):
                    self.turn = piece
                elif parts := answer.parts_of(piece.deltas):
                    yield sse(answer.envelope([answer.candidate(self.index, parts)]))


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
