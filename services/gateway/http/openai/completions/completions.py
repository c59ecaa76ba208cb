"""OpenAI's completions: text or token ids in, text and token ids out, complete or streamed.

For agents that render prompts themselves. A turn over ids is recorded like any other; its answer is
not parsed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from aiohttp import web

from forge.core.formats import TextDelta
from forge.core.token_columns import int32_array
from services.gateway.conversation.turn_request import TurnRequest, choices_of
from services.gateway.http.choices import Choice, finish_all, merged
from services.gateway.http.edge import Endpoints, json_response, sse, stream_events
from services.gateway.http.forward import ModelRequest, served_or_forwarded
from services.gateway.http.openai.completions import completions_schema as schema
from services.gateway.http.openai.completions.completion_object import (
    CompletionObject,
    error_event,
    finish_reason,
    usage_of,
)
from services.gateway.http.openai.fields import COMPLETIONS
from services.gateway.http.request_fields.parameters import decode_request
from services.gateway.http.request_fields.request_body import checked_stops
from services.gateway.model.chat_model import ChatModel, TextStream
from services.gateway.turns.answer_parser import LikelyToken, TokenLogprob
from services.gateway.turns.types import Piece, Turn


class Completions(Endpoints):
    """`POST /v1/completions`."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the route of `/v1/completions`."""
        path = "/v1/completions"
        handler = served_or_forwarded(
            self._edge, path, self._create, error_events=lambda _: error_event
        )
        router.add_post(f"{prefix}{path}", handler)

    async def _create(self, request: ModelRequest) -> web.StreamResponse:
        edge, claims = self._edge, request.claims
        asked, headers = decode_request(request.body, schema.CompletionRequest, COMPLETIONS)
        turns = edge.models.turns(claims, asked.model)
        model = turns.model
        sampling, stop = await schema.sampling_of(asked), checked_stops("stop", asked.stop)
        limit = turns.context_limit(claims)
        prompts = [
            TurnRequest(
                prompt_ids=await schema.prompt_ids(
                    model, prompt, special=asked.add_special_tokens is not False, limit=limit
                ),
                sampling=sampling,
                stop=stop,
                stream=bool(asked.stream),
                headers=headers,
                arrived=request.arrived,
            )
            for prompt in schema.prompts_of(asked)
        ]
        async with edge.sessions.use_session(claims) as session:
            completion = Completion(
                turns=turns,
                session=session,
                model=asked.model,
                requests=[
                    one
                    for prompt in prompts
                    for one in choices_of(prompt, schema.answers_of(asked))
                ],
                prompts=len(prompts),
                include_usage=asked.includes_usage,
                asked=asked,
            )
            if not asked.stream:
                return json_response(await completion.complete(), headers=headers)
            return await stream_events(
                request.http, completion.events(), error_event=error_event, headers=headers
            )


@dataclass(slots=True, kw_only=True)
class Completion(CompletionObject):
    """The answers to one request."""

    id_prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    requests: Sequence[TurnRequest]
    """One per choice: the choices of a prompt are adjacent."""
    prompts: int
    asked: schema.CompletionRequest

    async def complete(self) -> dict[str, Any]:
        """Returns the completion object."""
        turns = await finish_all(self.turns, self.session, self.requests)
        choices = [self._choice(index, turn) for index, turn in enumerate(turns)]
        return self.complete_object(choices, turns)

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the answers as server-sent events; the last item is an `Ending`."""
        choices = [_StreamedChoice(self, index) for index in range(len(self.requests))]
        return merged(choices, end=self.end)

    def choice(self, index: int, text: str) -> dict[str, Any]:
        """Returns a choice without a finish_reason."""
        return {"index": index, "text": text, "finish_reason": None, "logprobs": None}

    def echoed(self, index: int) -> str:
        """Returns the text before an answer."""
        return self.turns.model.decode(self.requests[index].prompt_ids) if self.asked.echo else ""

    def prompt_ids(self, index: int) -> dict[str, Any]:
        """Returns the field with the ids of a choice's prompt, if they are requested."""
        if not self.asked.return_token_ids:
            return {}
        return {"prompt_token_ids": list(int32_array(self.requests[index].prompt_ids))}

    def end_of(self, turn: Turn) -> dict[str, Any]:
        """Returns the last fields of a choice."""
        last: dict[str, Any] = {"finish_reason": finish_reason(turn)}
        if self.asked.logprobs is not None:
            tokens = turn.token_logprobs()
            as_ids = bool(self.asked.return_tokens_as_token_ids)
            last["logprobs"] = logprobs(self.turns.model, tokens, as_ids=as_ids)
        return last

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        text = self.echoed(index) + turn.message.content
        choice = self.choice(index, text) | self.end_of(turn) | self.prompt_ids(index)
        if self.asked.return_token_ids:
            choice["token_ids"] = list(int32_array(turn.sampled.ids))
        return choice

    def usage(self, turns: list[Turn]) -> dict[str, Any]:
        """As `CompletionObject.usage`: the sum over the prompts."""
        each = len(self.requests) // self.prompts
        groups = [usage_of(turns[at : at + each]) for at in range(0, len(turns), each)]
        prompt, sampled, cached = (
            sum(one["prompt_tokens"] for one in groups),
            sum(one["completion_tokens"] for one in groups),
            sum(one["prompt_tokens_details"]["cached_tokens"] for one in groups),
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@dataclass(slots=True)
class _StreamedChoice(Choice):
    """The chunks of one choice."""

    completion: Completion
    index: int
    begun: bool = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields a chunk for each piece, and one at the end."""
        completion, index = self.completion, self.index
        run = completion.turns.run_turn(completion.session, completion.requests[index])
        async with aclosing(run) as pieces:
            async for piece in pieces:
                if isinstance(piece, Turn):
                    self.turn = piece
                    last = completion.choice(index, "") | completion.end_of(piece)
                    yield sse(completion.chunk_object([last]))
                elif choice := self._new(piece):
                    yield sse(completion.chunk_object([choice]))

    def _new(self, piece: Piece) -> dict[str, Any]:
        """Returns the choice with the new part of the answer; {} without one."""
        completion, ids = self.completion, bool(self.completion.asked.return_token_ids)
        text = "".join(delta.text for delta in piece.deltas if isinstance(delta, TextDelta))
        first, self.begun = not self.begun, True
        if first:
            text = completion.echoed(self.index) + text
        if not (text or (ids and (piece.ids or first))):
            return {}
        choice = completion.choice(self.index, text)
        if ids:
            choice["token_ids"] = list(int32_array(piece.ids))
            choice |= completion.prompt_ids(self.index) if first else {}
        return choice


def logprobs(model: ChatModel, tokens: Sequence[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    """Returns log-probs in the format of completions. Offsets count characters from the answer's
    begin; the parts of a character have its offset."""

    def name(token: LikelyToken) -> str:
        return f"token_id:{token.token_id}" if as_ids else token.text

    sampled = [token.sampled for token in tokens]
    stream = TextStream(model)
    ends = accumulate(len(stream.feed((token.token_id,))) for token in sampled)
    return {
        "tokens": list(map(name, sampled)),
        "token_logprobs": [token.logprob for token in sampled],
        "top_logprobs": [
            {name(one): one.logprob for one in (*token.top, token.sampled)} for token in tokens
        ],
        "text_offset": [0, *ends][: len(sampled)],
    }
