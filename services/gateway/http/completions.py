"""Chat completions: OpenAI's objects and chunks, made of turns.

Owns the encoding of answers, whole and streamed. A stream begins with the first token, so that
until then an error still has its status.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from forge.core.errors import ForgeError
from forge.core.formats import CallDelta, Delta, ReasoningDelta, TextDelta
from forge.core.messages import to_openai
from forge.core.trajectory import int32_array
from forge.v1 import common_pb2
from services.gateway.http.errors import error_body
from services.gateway.sessions import Session
from services.gateway.turns import Piece, Turn, TurnRequest, Turns

SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


@dataclass(slots=True, kw_only=True)
class Completion:
    """One request's answer in the making."""

    turns: Turns
    session: Session
    request: TurnRequest
    choices: int
    logprobs: bool
    include_usage: bool
    completion_id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """The completion object."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._turn()) for _ in range(self.choices)]
        turns = [task.result() for task in tasks]
        return self._envelope("chat.completion") | {
            "system_fingerprint": _fingerprint(turns),
            "choices": [self._choice(index, turn) for index, turn in enumerate(turns)],
            "usage": usage(turns),
        }

    async def stream(self, http_request: web.Request) -> web.StreamResponse:
        """Server-sent events, to the end. Raises `ForgeError` only before the first of them."""
        response = web.StreamResponse(headers=SSE_HEADERS)
        async with aclosing(self._chunks()) as chunks:
            try:
                async for chunk in chunks:
                    if not response.prepared:
                        await response.prepare(http_request)
                    await response.write(_event(chunk))
            except ForgeError as error:
                if not response.prepared:
                    raise
                # The status is sent already: OpenAI's clients look for an error event.
                await response.write(_event(error_body(error)))
                return response
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _turn(self) -> Turn:
        async with aclosing(self.turns.run(self.session, self.request)) as events:
            async for event in events:
                if isinstance(event, Turn):
                    return event
        raise AssertionError("a run ends with its turn or with an error")

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        choices = [_StreamedChoice(self, index) for index in range(self.choices)]
        async with aclosing(_merged([choice.chunks() for choice in choices])) as merged:
            async for chunk in merged:
                yield chunk
        finished = [choice.turn for choice in choices if choice.turn is not None]
        if self.include_usage:
            yield self._envelope("chat.completion.chunk") | {
                "choices": [],
                "usage": usage(finished),
            }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.turns.model.name,
        }

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        message = to_openai(turn.message)
        if turn.message.tool_calls and not turn.message.content:
            message["content"] = None
        choice: dict[str, Any] = {
            "index": index,
            "message": message | {"refusal": None},
            "finish_reason": finish_reason(turn),
            "logprobs": None,
        }
        if self.logprobs:
            choice["logprobs"] = {"content": _logprobs(turn), "refusal": None}
        return choice


class _StreamedChoice:
    """The chunks of one choice."""

    def __init__(self, completion: Completion, index: int) -> None:
        self._completion = completion
        self._index = index
        self._calls = 0
        self.turn: Turn | None = None

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        run = self._completion.turns.run(self._completion.session, self._completion.request)
        begun = False
        async with aclosing(run) as events:
            async for event in events:
                if not begun:
                    begun = True
                    yield self._chunk({"role": "assistant", "content": ""})
                if isinstance(event, Turn):
                    self.turn = event
                    yield self._last(event)
                else:
                    for chunk in self._pieces(event):
                        yield chunk

    def _pieces(self, piece: Piece) -> Iterable[dict[str, Any]]:
        for delta in piece.deltas:
            yield self._chunk(self._delta(delta))

    def _delta(self, delta: Delta) -> dict[str, Any]:
        match delta:
            case TextDelta(text=text):
                return {"content": text}
            case ReasoningDelta(text=text):
                return {"reasoning_content": text}
            case CallDelta(name=name, arguments=arguments, call_id=call_id):
                index, self._calls = self._calls, self._calls + 1
                function = {"name": name, "arguments": arguments}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"tool_calls": [call]}

    def _last(self, turn: Turn) -> dict[str, Any]:
        chunk = self._chunk({})
        chunk["choices"][0]["finish_reason"] = finish_reason(turn)
        if self._completion.logprobs:
            chunk["choices"][0]["logprobs"] = {"content": _logprobs(turn), "refusal": None}
        return chunk

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None}
        return self._completion._envelope("chat.completion.chunk") | {"choices": [choice]}


async def _merged(
    sources: list[AsyncGenerator[dict[str, Any], None]],
) -> AsyncGenerator[dict[str, Any], None]:
    """What several generators give, as it comes; the first error ends all of them."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    queue: asyncio.Queue[dict[str, Any] | ForgeError | None] = asyncio.Queue(maxsize=64)

    async def drain(source: AsyncGenerator[dict[str, Any], None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put(item)
            await queue.put(None)
        except ForgeError as error:
            await queue.put(error)

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            event = await queue.get()
            if isinstance(event, ForgeError):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def finish_reason(turn: Turn) -> str:
    if turn.sampled.finish_reason == common_pb2.FINISH_REASON_LENGTH:
        return "length"
    return "tool_calls" if turn.message.tool_calls else "stop"


def usage(turns: list[Turn]) -> dict[str, Any]:
    """Tokens of all choices; their prompt counts once, as it is one request's."""
    prompt_tokens = max((turn.prompt_tokens for turn in turns), default=0)
    sampled_tokens = sum(turn.sampled.tokens for turn in turns)
    cached_tokens = max((turn.sampled.cached_tokens for turn in turns), default=0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _fingerprint(turns: list[Turn]) -> str:
    """Which weights answered: the newest version among the sampled tokens."""
    versions = [v for turn in turns for v in int32_array(turn.sampled.weight_versions)[-1:]]
    return f"weights-{max(versions)}" if versions else ""


def _logprobs(turn: Turn) -> list[dict[str, Any]]:
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in turn.token_logprobs()
    ]


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
