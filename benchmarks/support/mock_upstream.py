"""An upstream that answers the same to everything, in Forge's inference RPC and in OpenAI's HTTP.

Registers as a router. Each answer is `pieces` pieces of `piece_tokens` tokens with `pause_s`
before each of them, so that whoever stands in front is measured, not a model.

    python -m benchmarks.support.mock_upstream --model-path DIR --http-port N ...
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from forge.core.token_columns import TOKEN_BYTES, float32_bytes, int32_bytes
from forge.runtime.config import Port, ServiceConfig
from forge.runtime.process.service import ServiceContext
from forge.runtime.process.startup import run
from forge.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from services.gateway.model.chat_model import ChatModel
from services.inference.router.sample_stream import SampleStreams

FULL_NAME = "forge.v1.InferenceService"
WORDS = "the quick brown fox looks up the answer in the table and then "


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig(ServiceConfig):
    """Answers at once, or at a pace."""

    model_path: str = ""
    """Where the tokenizer is."""
    http_port: Port = 0
    """OpenAI's protocol."""
    pieces: int = 4
    """Pieces of an answer."""
    piece_tokens: int = 8
    """Tokens of a piece."""


class Script:
    """The answer, made once."""

    def __init__(self, model: ChatModel, config: MockConfig) -> None:
        count = config.pieces * config.piece_tokens
        ids = model.encode(WORDS * count)[: (count - 1) * TOKEN_BYTES]
        ids += int32_bytes([min(model.stop_ids)])
        step = config.piece_tokens * TOKEN_BYTES
        parts = [ids[at : at + step] for at in range(0, len(ids), step)]
        self.tokens = [
            common_pb2.SampledTokens(
                ids=part,
                logprobs=float32_bytes([-0.5] * config.piece_tokens),
                weight_versions=int32_bytes([1] * config.piece_tokens),
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


class MockInference(inference_pb2_grpc.InferenceServiceServicer):
    """Serves the one call that gateways make."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._streams = SampleStreams(self._sample)

    async def SampleStream(  # noqa: N802
        self, requests: AsyncIterator[inference_pb2.SampleStreamRequest], context: Any
    ) -> AsyncIterator[inference_pb2.SampleStreamResponse]:
        async for response in self._streams.serve(requests):
            yield response

    async def _sample(
        self, request: inference_pb2.SampleRequest
    ) -> AsyncGenerator[inference_pb2.SampleResponse, None]:
        tokens = self._script.tokens
        pause_s = _pause_s(request.sampling.max_tokens)
        for piece in tokens[:-1]:
            await asyncio.sleep(pause_s)
            yield inference_pb2.SampleResponse(tokens=piece)
        await asyncio.sleep(pause_s)
        yield inference_pb2.SampleResponse(
            tokens=tokens[-1], finish_reason=common_pb2.FINISH_REASON_STOP
        )


class MockHttp:
    """What LiteLLM, sglang-router and the bare proxy stand in front of."""

    def __init__(self, script: Script) -> None:
        self._script = script

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
        if not asked.get("stream"):
            return web.json_response(self._script.completion)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        pause_s = _pause_s(asked.get("max_tokens", 0))
        first, *pieces = self._script.events
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
        script = Script(ChatModel.load(config.model_path), config)
        self._context.server.add_service(
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            MockInference(script),  # type: ignore[abstract]
            full_name=FULL_NAME,
        )
        self._runner = web.AppRunner(MockHttp(script).application(), access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", config.http_port).start()

    async def drain(self) -> None:
        """Calls end by themselves."""

    async def stop(self) -> None:
        await self._runner.cleanup()


def _pause_s(max_tokens: int) -> float:
    """How slow to be: every protocol in between passes `max_tokens` on, and 1000 + n asks for a
    pause of n milliseconds before each piece."""
    return max(0, max_tokens - 1000) / 1000 if max_tokens < 2000 else 0.0


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
