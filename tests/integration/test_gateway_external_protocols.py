"""External APIs over Gemini's protocol and over WebSocket; other ways to them are refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support.gateway.external_api import KEY, ExternalServer, external_server
from tests.support.gateway.stack import GatewayStack, recorded

GATEWAY = "gateway-protocols"


@pytest_asyncio.fixture(scope="module")
async def api() -> AsyncIterator[ExternalServer]:
    async with external_server() as server:
        yield server


@pytest_asyncio.fixture(scope="module")
async def served(stack: GatewayStack, api: ExternalServer) -> None:
    """A gateway with an API of each protocol."""
    key_file = stack.folder / "protocols.key"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    common = {"kind": "external", "key_file": str(key_file), "open": True}
    models = {
        "big": common | {"url": f"{api.url}/v1", "upstream": "big-1"},
        "claude": common | {"url": api.url, "protocol": "anthropic"},
        "gem": common | {"url": api.url, "protocol": "gemini", "upstream": "gem-1"},
    }
    stack.start_gateway(GATEWAY, "--models", json.dumps(models))


@pytest_asyncio.fixture
async def gateway(stack: GatewayStack, served: None, own_coordinator: Coordinator) -> Instance:
    return await stack.gateway(own_coordinator, GATEWAY)


def http_of(stack: GatewayStack, gateway: Instance, trajectory_id: str) -> aiohttp.ClientSession:
    headers = {"x-goog-api-key": stack.token(trajectory_id)}
    return aiohttp.ClientSession(f"http://{gateway.metadata['http']}", headers=headers)


def contents(text: str) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": text}]}]}


async def turns_of(
    stack: GatewayStack, coordinator: Coordinator, gateway: Instance, trajectory_id: str
) -> list[common_pb2.Turn]:
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        await agent.close()
    return list((await recorded(stack, coordinator, trajectory_id)).turns)


async def test_gemini_api_is_passed_through_complete_and_streamed(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, api: ExternalServer
) -> None:
    """With the operator's key, and the API's name of the model in the path. Recorded."""
    api.requests.clear()
    async with http_of(stack, gateway, "gemini:0:0") as http:
        async with http.post("/v1beta/models/gem:generateContent", json=contents("ok")) as whole:
            assert (whole.status, whole.headers["X-Forge-Turn"]) == (200, "0")
            text = (await whole.json())["candidates"][0]["content"]["parts"][0]["text"]
            assert text == "Hello you"
        path = "/v1beta/models/gem:streamGenerateContent"
        async with http.post(path, params={"alt": "sse"}, json=contents("ok")) as stream:
            lines = [line async for line in stream.content if line.strip()]
        assert len(lines) == 3
        assert all(line.startswith(b"data: {") for line in lines)
        async with http.post("/v1/models/gem:countTokens", json=contents("ok")) as counted:
            assert await counted.json() == {"totalTokens": 12}
    for asked_path, headers, body in api.requests:
        assert asked_path.startswith("/v1beta/models/gem-1:")
        assert (headers["x-goog-api-key"], body) == (KEY, contents("ok"))
    one, two = await turns_of(stack, own_coordinator, gateway, "gemini:0:0")
    for turn in (one, two):
        assert (turn.other_model.name, turn.other_model.kind) == ("gem", "external")
        assert (turn.other_model.prompt_tokens, turn.other_model.sampled_tokens) == (11, 3)
        assert "Hel" in json.loads(turn.messages_json)["response"]


async def test_cut_gemini_stream_ends_with_an_error_event(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A stream without `finishReason` is an aborted turn."""
    async with http_of(stack, gateway, "gemini-cut:0:0") as http:
        path = "/v1beta/models/gem:streamGenerateContent?alt=sse"
        async with http.post(path, json=contents("cut")) as stream:
            *_, last = [line async for line in stream.content if line.strip()]
    assert "ended in mid-answer" in json.loads(last.removeprefix(b"data: "))["error"]["message"]
    (turn,) = await turns_of(stack, own_coordinator, gateway, "gemini-cut:0:0")
    assert turn.finish_reason == common_pb2.FINISH_REASON_ABORTED


async def test_websocket_passes_the_events_of_an_external_api(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, api: ExternalServer
) -> None:
    """Responses of the API and of the policy on one connection; an error keeps its body, and a
    stream that is cut ends with an error event."""
    api.requests.clear()

    async def events(socket: Any, **asked: Any) -> list[dict[str, Any]]:
        await socket.send_json({"type": "response.create", "store": False} | asked)
        got: list[dict[str, Any]] = []
        while not got or got[-1]["type"] not in ("response.completed", "error"):
            got.append(await socket.receive_json(timeout=60.0))
        return got

    async with (
        http_of(stack, gateway, "socket:0:0") as http,
        http.ws_connect("/v1/responses") as socket,
    ):
        first, *deltas, last = await events(socket, model="big", input="ok", exotic=1)
        assert first["headers"]["X-Forge-Model"] == "big"
        assert "".join(event["delta"] for event in deltas) == "Hello you"
        assert last["response"]["usage"]["output_tokens"] == 3
        assert (await events(socket, model="policy", input="SAY[[hm]]"))[-1]["type"] != "error"
        (refused,) = await events(socket, model="big", input="status 400")
        assert (refused["status"], refused["error"]["message"]) == (400, "wrong with ***")
        (limited,) = await events(socket, model="big", input="status 429")
        assert limited["status"] == 429
        *_, cut = await events(socket, model="big", input="cut")
        assert cut["type"] == "error"
        assert "ended in mid-answer" in cut["error"]["message"]
        (warm,) = await events(socket, model="big", input="ok", generate=False)
        assert "generate: false" in warm["error"]["message"]
        (wrong,) = await events(socket, model="claude", input="ok")
        assert "it is called by POST /v1/messages" in wrong["error"]["message"]
    path, _, body = api.requests[0]
    assert path == "/v1/responses"
    assert body == {"store": False, "model": "big-1", "input": "ok", "exotic": 1, "stream": True}
    turns = await turns_of(stack, own_coordinator, gateway, "socket:0:0")
    assert [turn.other_model.name for turn in turns] == ["big", "", "big"]
    assert [turn.finish_reason == common_pb2.FINISH_REASON_ABORTED for turn in turns] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("model", ["big", "claude", "gem"])
async def test_refusal_names_the_ways_that_reach_an_api(
    stack: GatewayStack, gateway: Instance, model: str
) -> None:
    """Over gRPC, which has messages and tokens of its own, and over other protocols."""
    ways = {
        "big": "POST /v1/chat/completions or .* and by a WebSocket at /v1/responses",
        "claude": "POST /v1/messages",
        "gem": "POST /v1beta/models/gem:generateContent",
    }[model]
    token = stack.token(f"refused-{model}:0:0")
    metadata = (("authorization", f"Bearer {token}"),)
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        message = gateway_pb2.ChatMessage(role="user", content="hi")
        for call in (
            stub.Chat(gateway_pb2.ChatRequest(messages=[message], model=model), metadata=metadata),
            stub.Generate(
                gateway_pb2.GenerateRequest(prompt_ids=b"\1\0\0\0", model=model), metadata=metadata
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=ways) as refused:
                await anext(aiter(call))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with http_of(stack, gateway, f"refused-{model}:0:0") as http:
        paths = {"/v1beta/models/{}:generateContent": contents("ok")} if model != "gem" else {}
        paths |= {} if model == "big" else {"/v1/chat/completions": {"messages": []}}
        for path, body in paths.items():
            asked = body if "{}" in path else body | {"model": model}
            async with http.post(path.format(model), json=asked) as response:
                text = json.loads(await response.text())["error"]["message"]
            assert response.status == 400 and "it is called by POST" in text
