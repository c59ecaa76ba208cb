"""`POST /tokenize` and `POST /detokenize`, in the format of vLLM.

A conversation is tokenized as the prompt of a request in this session: earlier answers have their
sampled ids. Records no turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from forge.core.errors import InvalidArgument
from forge.core.tasks.template_kwargs import kwargs_json
from forge.core.token_columns import int32_array
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.http.edge import Endpoints, json_response
from services.gateway.http.openai.completions import chat_schema
from services.gateway.http.openai.completions.completions_schema import checked_ids, prompt_ids
from services.gateway.http.request_fields.parameters import Fields, decode_request
from services.gateway.model.chat_model import ChatModel, TextStream
from services.gateway.turns.run import Turns

SLICE_TOKENS = 4096
"""Decoded at once, in about a millisecond."""
_FIELDS = Fields(harmless=frozenset({"user", "request_id"}))


class TokenizeRequest(msgspec.Struct):
    """The body of `/tokenize`: a prompt, or messages."""

    model: str = ""
    prompt: str | None = None
    messages: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """An array of `ChatMessage`."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Before a prompt; true by default."""
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    """The body of `/detokenize`."""

    tokens: list[int]
    model: str = ""


class Tokens(Endpoints):
    """The endpoints for tokens."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the routes `/tokenize` and `/detokenize`."""
        router.add_post(f"{prefix}/tokenize", self._tokenize)
        router.add_post(f"{prefix}/detokenize", self._detokenize)

    async def _tokenize(self, request: web.Request) -> web.Response:
        edge = self._edge
        claims = edge.claims(request)
        asked, headers = decode_request(await edge.read_body(request), TokenizeRequest, _FIELDS)
        turns = edge.models.turns_or_policy(claims, asked.model)
        if (asked.prompt is None) == (not bytes(asked.messages)):
            raise InvalidArgument("either prompt or messages is needed")
        model = turns.model
        limit = turns.context_limit(claims)
        if asked.prompt is None:
            ids = await self._of_messages(claims, turns, asked)
        else:
            special = asked.add_special_tokens is not False
            ids = await prompt_ids(model, asked.prompt, special=special, limit=limit)
        tokens = list(int32_array(ids))
        strings = [model.piece(token) for token in tokens] if asked.return_token_strs else None
        answer = {
            "count": len(tokens),
            "max_model_len": limit,
            "tokens": tokens,
            "token_strs": strings,
        }
        return json_response(answer, headers=headers)

    async def _of_messages(self, claims: Claims, turns: Turns, asked: TokenizeRequest) -> bytes:
        chat = chat_schema.ChatCompletionRequest(
            model=asked.model,
            messages=asked.messages,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        messages = chat_schema.messages_of(chat, self._edge.images)
        before, prefill = chat_schema.prefill_of(chat, messages)
        turn = TurnRequest(
            messages=before,
            prefill=prefill,
            tools=chat_schema.tools_of(asked.tools),
            template_kwargs=kwargs_json(asked.chat_template_kwargs),
            sampling=common_pb2.SamplingParams(),
            arrived=Moment.now(),
        )
        async with self._edge.sessions.use_session(claims) as session:
            return await turns.prompt_ids(session, turn)

    async def _detokenize(self, request: web.Request) -> web.Response:
        edge = self._edge
        claims = edge.claims(request)
        asked, headers = decode_request(await edge.read_body(request), DetokenizeRequest, _FIELDS)
        model = edge.models.turns_or_policy(claims, asked.model).model
        checked_ids("tokens", model, asked.tokens)
        return json_response({"prompt": await text_of(model, asked.tokens)}, headers=headers)


async def text_of(model: ChatModel, ids: Sequence[int]) -> str:
    """Returns the text of any number of ids, with special tokens. Other requests go on between
    slices; a thread would not help, because decoding holds the lock of the interpreter."""
    stream = TextStream(model, special=True)
    pieces = []
    for start in range(0, len(ids), SLICE_TOKENS):
        pieces.append(stream.feed(ids[start : start + SLICE_TOKENS]))
        await asyncio.sleep(0)
    return "".join(pieces) + stream.finish()
