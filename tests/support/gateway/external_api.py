"""A real HTTP server in the place of an external API, which does what the request says.

The last message is the script: `ok`, `status 429`, `cut`, `cut hard`, `hang`, `slow`, `large`; any
other text is answered like `ok`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEY = "sk-secret-of-the-operator"
WORDS = ("Hel", "lo ", "you")


@dataclass(kw_only=True)
class ExternalServer:
    """What was asked of it, and where it listens."""

    url: str = ""
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Path, headers and body."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends slow answers."""
    began_slow: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, dict(request.headers), body))
        script = _script(body)
        if script.startswith("status "):
            return _refusal(int(script.split()[1]))
        if script == "slow":
            self.began_slow.set()
            await self.release.wait()
        if request.path.endswith("/embeddings"):
            vector = {"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}
            usage = {"prompt_tokens": 3, "total_tokens": 3}
            data = {"object": "list", "data": [vector], "model": "e", "usage": usage}
            return web.json_response(data)
        if request.path.endswith("/count_tokens"):
            return web.json_response({"input_tokens": 12})
        if ":" in request.path:
            return await self._gemini(request, script)
        if request.path.endswith("/responses"):
            return await self._send(request, script, _responses_events())
        anthropic = request.path.endswith("/messages")
        if not body.get("stream"):
            whole = _anthropic(WORDS) if anthropic else _openai(WORDS, large=script == "large")
            return web.json_response(whole)
        return await self._stream(request, script, anthropic=anthropic)

    async def _stream(
        self, request: web.Request, script: str, *, anthropic: bool
    ) -> web.StreamResponse:
        events = _anthropic_events() if anthropic else _openai_events()
        return await self._send(request, script, events)

    async def _gemini(self, request: web.Request, script: str) -> web.StreamResponse:
        if request.path.endswith(":countTokens"):
            return web.json_response({"totalTokens": 12})
        if request.path.endswith(":streamGenerateContent") and request.query.get("alt") == "sse":
            return await self._send(request, script, _gemini_events())
        return web.json_response(_gemini("".join(WORDS), last=True))

    async def _send(
        self, request: web.Request, script: str, events: list[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(events):
            if script == "cut" and number == 2:
                return response
            if script == "hang" and number == 2:
                await self.release.wait()
            if script == "cut hard" and number == 2:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(event.encode())
        return response


@asynccontextmanager
async def external_server() -> AsyncIterator[ExternalServer]:
    """Runs the server on loopback."""
    server = ExternalServer()
    app = web.Application()
    app.router.add_post("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    server.release.set()
    await runner.cleanup()


def _script(body: dict[str, Any]) -> str:
    if "messages" in body:
        content = body["messages"][-1]["content"]
        return content if isinstance(content, str) else str(content[0].get("text"))
    if "contents" in body:
        return str(body["contents"][-1]["parts"][0]["text"])
    return str(body.get("input") or body.get("prompt") or "")


def _refusal(status: int) -> web.Response:
    message = f"wrong with {KEY}" if status == 400 else f"Incorrect API key provided: {KEY}"
    error = {"error": {"message": message, "type": "invalid_request_error", "code": "bad"}}
    return web.json_response(error, status=status, headers={"Retry-After": "7"})


def _openai(words: tuple[str, ...], *, large: bool) -> dict[str, Any]:
    content = "x" * 200_000 if large else "".join(words)
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "big-1",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": content},
            }
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
    }


def _openai_events() -> list[str]:
    events: list[dict[str, Any]] = [
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "big-1",
            "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}],
        }
        for word in WORDS
    ]
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    events.append(events[0] | {"choices": [], "usage": usage})
    return [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]


def _anthropic(words: tuple[str, ...]) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "big-1",
        "content": [{"type": "text", "text": "".join(words)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 11, "output_tokens": 3},
    }


def _anthropic_events() -> list[str]:
    begun = _anthropic(()) | {"content": [], "stop_reason": None}
    begun["usage"] = {"input_tokens": 11, "output_tokens": 1}
    block = {"type": "text", "text": ""}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": block},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": word},
            }
            for word in WORDS
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 3},
        },
        {"type": "message_stop"},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]


def _responses_events() -> list[str]:
    response: dict[str, Any] = {"id": "resp_1", "object": "response", "model": "big-1"}
    usage = {"input_tokens": 11, "output_tokens": 3, "total_tokens": 14}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response},
        *({"type": "response.output_text.delta", "delta": word} for word in WORDS),
        {"type": "response.completed", "response": response | {"usage": usage}},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]


def _gemini(text: str, *, last: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": [{"text": text}]}}
    end = {"finishReason": "STOP"} if last else {}
    usage = {"promptTokenCount": 11, "candidatesTokenCount": 2, "thoughtsTokenCount": 1}
    return {"candidates": [candidate | end], "usageMetadata": usage}


def _gemini_events() -> list[str]:
    chunks = [_gemini(word, last=word == WORDS[-1]) for word in WORDS]
    return [f"data: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks]
