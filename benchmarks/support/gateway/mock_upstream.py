"""An upstream that answers the same to everything, in Forge's inference RPC and in OpenAI's HTTP.

Registers as a router. Each answer is `pieces` pieces of `piece_tokens` tokens with a pause
before each of them, so that the process in front is measured, not a model. A request may name
another length; that answer is one token per piece, as engines stream.

    python -m benchmarks.support.gateway.mock_upstream --model-path DIR --http-port N ...
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from forge.core.token_columns import TOKEN_BYTES, float32_bytes, int32_bytes
from forge.runtime.process.service import ServiceContext
from forge.runtime.process.startup import run
from forge.runtime.settings import Port, ServiceConfig
from forge.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from services.gateway.model.chat_model import ChatModel
from services.inference.config import RouterSettings
from services.inference.router.sample_stream import SampleStreams

FULL_NAME = "forge.v1.InferenceService"
WORDS = "the quick brown fox looks up the answer in the table and then "
LENGTHS = (32, 256, 2048)
"""Tokens of the answers that a request may name."""
NAMED, STEP = 2000, 1000
"""The first `max_tokens` that names a length, and the distance to the next length."""


def max_tokens_for(length: int, pause_ms: int) -> int:
    """The `max_tokens` that ask for an answer of `length` tokens, `pause_ms` before each."""
    return NAMED + STEP * LENGTHS.index(length) + pause_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig(ServiceConfig):
    """Answers at once, or at a pace."""

    model_path: str = ""
    """Directory of the tokenizer."""
    http_port: Port = 0
    """OpenAI's protocol."""
    pieces: int = 4
    """Pieces of an answer."""
    piece_tokens: int = 8
    """Tokens of a piece."""
    stream_interval_s: float = RouterSettings().stream_interval_s
    """As a router's."""


class Script:
    """An answer, made once."""

    def __init__(self, model: ChatModel, *, pieces: int, piece_tokens: int) -> None:
        count = pieces * piece_tokens
        ids = model.encode(WORDS * count)[: (count - 1) * TOKEN_BYTES]
        ids += int32_bytes([min(model.stop_ids)])
        step = piece_tokens * TOKEN_BYTES
        parts = [ids[at : at + step] for at in range(0, len(ids), step)]
        self.tokens = [
            common_pb2.SampledTokens(
                ids=part,
                logprobs=float32_bytes([-0.5] * piece_tokens),
                weight_versions=int32_bytes([1] * piece_tokens),
            )
            for part in parts
        ]
        texts = [model.decode(part) for part in parts]
        self.text = "".join(texts)
        self.events = [_chunk({"role": "assistant", "content": ""}, None)]
        self.events += [_chunk({"content": text}, None) for text in texts]
        self.events[-1] += _chunk({}, "stop") + b"data: [DONE]\n\n"
        self.completion = {
            "id": "chatcmpl-mock",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": self.text},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count},
        }


class Scripts:
    """The answers to all requests, by their `max_tokens`."""

    def __init__(self, model: ChatModel, config: MockConfig) -> None:
        self._default = Script(model, pieces=config.pieces, piece_tokens=config.piece_tokens)
        self._named = [Script(model, pieces=length, piece_tokens=1) for length in LENGTHS]

    def choose(self, max_tokens: int) -> tuple[Script, float]:
        """The answer, and the pause before each piece in seconds: every protocol in between passes
        `max_tokens` on, and 1000 + n asks for n milliseconds."""
        if NAMED <= max_tokens < NAMED + STEP * len(LENGTHS):
            index, pause_ms = divmod(max_tokens - NAMED, STEP)
            return self._named[index], pause_ms / 1000
        return self._default, max(0, max_tokens - 1000) / 1000 if max_tokens < NAMED else 0.0


class MockInference(inference_pb2_grpc.InferenceServiceServicer):
    """Serves the one call that gateways make."""

    def __init__(self, scripts: Scripts, *, interval_s: float) -> None:
        self._scripts = scripts
        self._streams = SampleStreams(self._sample, interval_s=interval_s)

    async def SampleStream(  # noqa: N802
        self, requests: AsyncIterator[inference_pb2.SampleStreamRequest], context: Any
    ) -> AsyncIterator[inference_pb2.SampleStreamResponse]:
        async for response in self._streams.serve(requests):
            yield response

    async def _sample(
        self, request: inference_pb2.SampleRequest
    ) -> AsyncGenerator[inference_pb2.SampleResponse, None]:
        script, pause_s = self._scripts.choose(request.sampling.max_tokens)
        tokens = script.tokens
        for piece in tokens[:-1]:
            await asyncio.sleep(pause_s)
            yield inference_pb2.SampleResponse(tokens=piece)
        await asyncio.sleep(pause_s)
        yield inference_pb2.SampleResponse(
            tokens=tokens[-1], finish_reason=common_pb2.FINISH_REASON_STOP
        )


class MockHttp:
    """Upstream of LiteLLM, sglang-router and the bare proxy."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._complete)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        for path in ("/v1/models", "/get_model_info", "/get_server_info", "/model_info"):
            app.router.add_get(path, self._about)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        script, pause_s = self._scripts.choose(asked.get("max_tokens", 0))
        if not asked.get("stream"):
            return web.json_response(script.completion)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, *pieces = script.events
        for number, piece in enumerate(pieces):
            await asyncio.sleep(pause_s)
            await response.write(piece if number else first + piece)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _about(self, request: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "mock"}
        return web.json_response(
            {"object": "list", "data": [model], "model_path": "policy", "is_generation": True}
        )


class MockApp:
    """Wiring, as any service's."""

    kind = "router"

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def start(self) -> None:
        config = self._context.config
        scripts = Scripts(ChatModel.load(config.model_path), config)
        self._context.server.add_service(
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            MockInference(scripts, interval_s=config.stream_interval_s),  # type: ignore[abstract]
            full_name=FULL_NAME,
        )
        self._runner = web.AppRunner(MockHttp(scripts).application(), access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", config.http_port).start()

    async def drain(self) -> None:
        """Calls end by themselves."""

    async def stop(self) -> None:
        await self._runner.cleanup()


def _chunk(delta: dict[str, Any], finish_reason: str | None) -> bytes:
    chunk = {
        "id": "chatcmpl-mock",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


if __name__ == "__main__":
    run("mock-upstream", MockConfig, lambda: MockApp)
