"""OpenAI's Chat Completions API: encodes turns as completions, complete or streamed.

Owns the encoding of answers. A stream begins with the first token, so an earlier error still gets
its HTTP status.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web

from forge.core.conversation.messages import to_openai
from forge.core.formats import CallDelta, Delta, ReasoningDelta, TextDelta
from forge.core.token_columns import int32_array
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import TurnRequest, choices_of
from services.gateway.http.choices import Choice, finish_all, merged
from services.gateway.http.edge import Ending, Endpoints, json_response, sse, stream_events
from services.gateway.http.forward import ModelRequest, served_or_forwarded
from services.gateway.http.openai.completions import chat_schema
from services.gateway.http.openai.completions.completion_object import (
    CompletionObject,
    error_event,
    finish_reason,
    usage_of,
)
from services.gateway.http.openai.fields import CHAT
from services.gateway.http.request_fields.parameters import decode_request
from services.gateway.http.request_fields.request_body import checked_stops
from services.gateway.model.chat_model import ChatModel
from services.gateway.turns.answer_parser import LikelyToken
from services.gateway.turns.types import Piece, Turn


class ChatCompletions(Endpoints):
    """`POST /v1/chat/completions`."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the route of chat completions."""
        path = "/v1/chat/completions"
        handler = served_or_forwarded(
            self._edge, path, self._create, error_events=lambda _: error_event
        )
        router.add_post(f"{prefix}{path}", handler)

    async def _create(self, request: ModelRequest) -> web.StreamResponse:
        edge, claims = self._edge, request.claims
        asked, headers = decode_request(request.body, chat_schema.ChatCompletionRequest, CHAT)
        turns = edge.models.turns(claims, asked.model)
        turn = await self._turn_request(asked, headers, turns.model, request.arrived)
        choices = chat_schema.choices_of(asked)
        async with edge.sessions.use_session(claims) as session:
            completion = Completion(
                turns=turns,
                session=session,
                request=turn,
                model=asked.model,
                choices=choices,
                logprobs=bool(asked.logprobs),
                echo=bool(asked.echo),
                token_ids=bool(asked.return_token_ids),
                ids_as_text=bool(asked.return_tokens_as_token_ids),
                include_usage=asked.includes_usage,
            )
            if turn.stream:
                # OpenAI's clients expect an error event.
                return await stream_events(
                    request.http, completion.events(), error_event=error_event, headers=turn.headers
                )
            return json_response(await completion.complete(), headers=turn.headers)

    async def _turn_request(
        self,
        asked: chat_schema.ChatCompletionRequest,
        headers: dict[str, str],
        model: ChatModel,
        arrived: Moment,
    ) -> TurnRequest:
        sampling = chat_schema.sampling_of(asked)
        sampling.MergeFrom(
            common_pb2.SamplingParams(grammar=await chat_schema.answer_grammar_of(asked))
        )
        messages = chat_schema.messages_of(asked, self._edge.images)
        before, prefill = chat_schema.prefill_of(asked, messages)
        return TurnRequest(
            messages=before,
            prefill=prefill,
            template_kwargs=chat_schema.template_kwargs_of(
                asked, model.template_variables, headers
            ),
            headers=headers,
            tools=chat_schema.tools_of(asked.tools),
            call_tools=asked.tool_choice != "none",
            parallel_calls=asked.parallel_tool_calls is not False,
            required_tool=chat_schema.required_tool(asked, model.format),
            sampling=sampling,
            stop=checked_stops("stop", asked.stop),
            stream=bool(asked.stream),
            arrived=arrived,
        )


@dataclass(slots=True, kw_only=True)
class Completion(CompletionObject):
    """The answer to one request."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole: ClassVar[str] = "chat.completion"
    chunk: ClassVar[str] = "chat.completion.chunk"

    request: TurnRequest
    choices: int
    logprobs: bool
    echo: bool = False
    """The answer begins with the prefill."""
    token_ids: bool = False
    """The ids of prompt and answer are returned."""
    ids_as_text: bool = False
    """Log-probs name tokens by their ids."""

    async def complete(self) -> dict[str, Any]:
        """Returns the completion object."""
        turns = await finish_all(self.turns, self.session, choices_of(self.request, self.choices))
        choices = [self._choice(index, turn) for index, turn in enumerate(turns)]
        return self.complete_object(choices, turns) | self.prompt_ids(turns[0].prompt_ids)

    def usage(self, turns: list[Turn]) -> dict[str, Any]:
        """As `CompletionObject.usage`; the choices have one prompt."""
        return usage_of(turns)

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the answer as server-sent events, simultaneous ones together; the last item is an
        `Ending`."""
        requests = choices_of(self.request, self.choices)
        choices = [_StreamedChoice(self, index, one) for index, one in enumerate(requests)]
        return choices[0].events() if len(choices) == 1 else merged(choices, end=self.end)

    def prompt_ids(self, ids: bytes) -> dict[str, Any]:
        """Returns the field with the ids of the prompt, if they are requested."""
        return {"prompt_token_ids": list(int32_array(ids))} if self.token_ids else {}

    def logprobs_of(self, turn: Turn) -> dict[str, Any]:
        """Returns the log-probs of a choice."""
        return {"content": token_logprobs(turn, ids_as_text=self.ids_as_text), "refusal": None}

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        message = to_openai(turn.message if self.echo else turn.said)
        if turn.message.tool_calls and not turn.message.content:
            message["content"] = None
        choice: dict[str, Any] = {
            "index": index,
            "message": message | {"refusal": None},
            "finish_reason": finish_reason(turn),
            "logprobs": None,
        }
        if self.logprobs:
            choice["logprobs"] = self.logprobs_of(turn)
        if self.token_ids:
            choice["token_ids"] = list(int32_array(turn.sampled.ids))
        return choice


@dataclass(slots=True)
class _StreamedChoice(Choice):
    """The chunks of one choice."""

    completion: Completion
    index: int
    request: TurnRequest
    calls: int = 0
    begun: bool = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the chunks of each piece together; a single choice also ends the completion."""
        run = self.completion.turns.run_turn(self.completion.session, self.request)
        begun = self.completion.request.prefill if self.completion.echo else ""
        chunks = [self._chunk({"role": "assistant", "content": begun})]
        async with aclosing(run) as pieces:
            async for piece in pieces:
                if isinstance(piece, Turn):
                    self.turn = piece
                    last = b"".join(map(sse, [*chunks, self._last(piece)]))
                    alone = self.completion.choices == 1
                    yield Ending(last + self.completion.end([piece])) if alone else last
                    return
                chunks += [self._chunk(self._delta(delta)) for delta in piece.deltas]
                if self.completion.token_ids:
                    chunks = self._with_ids(chunks, piece)
                # The last piece is sent with the end, after the turn is recorded.
                if chunks and not piece.last:
                    yield b"".join(map(sse, chunks))
                    chunks = []

    def _delta(self, delta: Delta) -> dict[str, Any]:
        match delta:
            case TextDelta(text=text):
                return {"content": text}
            case ReasoningDelta(text=text):
                return {"reasoning_content": text}
            case CallDelta(name=name, arguments=arguments, call_id=call_id):
                index, self.calls = self.calls, self.calls + 1
                function = {"name": name, "arguments": arguments}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"tool_calls": [call]}

    def _last(self, turn: Turn) -> dict[str, Any]:
        chunk = self._chunk({})
        chunk["choices"][0]["finish_reason"] = finish_reason(turn)
        if self.completion.logprobs:
            chunk["choices"][0]["logprobs"] = self.completion.logprobs_of(turn)
        return chunk

    def _with_ids(self, chunks: list[dict[str, Any]], piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a piece with its ids, which may have no text yet; the first one
        has the ids of the prompt."""
        if not self.begun:
            self.begun = True
            chunks[0] |= self.completion.prompt_ids(piece.prompt_ids)
        chunks = chunks or [self._chunk({})]
        chunks[-1]["choices"][0]["token_ids"] = list(int32_array(piece.ids))
        return chunks

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": self.index, "delta": delta, "finish_reason": None, "logprobs": None}
        return self.completion.chunk_object([choice])


def token_logprobs(turn: Turn, *, ids_as_text: bool = False) -> list[dict[str, Any]]:
    """Returns the log-probs of a turn in OpenAI's format. `ids_as_text`: tokens are named by id."""
    return [
        _logprob(token.sampled, ids_as_text)
        | {"top_logprobs": [_logprob(likely, ids_as_text) for likely in token.top]}
        for token in turn.token_logprobs()
    ]


def _logprob(token: LikelyToken, as_id: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{token.token_id}" if as_id else token.text,
        "logprob": token.logprob,
        "bytes": list(token.raw),
    }
