"""Agents of Gemini's REST API against real processes; tests/clients has the unmodified SDK."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from forge.runtime.coordination import Coordinator, Instance
from tests.support.gateway.stack import GatewayStack, check_exact, recorded

FAMILY = "qwen3"
CALL = (
    '<think>\nwhere\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "box"}}\n'
    "</tool_call>"
)
TOOLS = [
    {
        "functionDeclarations": [
            {
                "name": "look",
                "description": "Look.",
                "parameters": {"type": "OBJECT", "properties": {"at": {"type": "STRING"}}},
            }
        ]
    }
]


def said(role: str, *parts: Any) -> dict[str, Any]:
    return {
        "role": role,
        "parts": [{"text": one} if isinstance(one, str) else one for one in parts],
    }


async def post(gateway: Instance, token: str, call: str, **body: Any) -> aiohttp.ClientResponse:
    """A read response of a model call; the key is in the header of Google's clients."""
    url = f"http://{gateway.metadata['http']}/v1beta/models/{call}"
    headers = {"x-goog-api-key": token}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as got:
        await got.read()
        return got


async def test_a_tool_loop_is_recorded_exactly(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Whole, as events and as an array: thoughts, calls and results become one linear trajectory
    with the sampled ids."""
    token = stack.token("gemini:0:0")
    contents = [said("user", f"Look. SAY[[{CALL}]]")]
    shared: dict[str, Any] = {
        "systemInstruction": said("user", "Be brief."),
        "tools": TOOLS,
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}, "temperature": 1},
    }
    ask = shared | {"contents": contents}
    counted = await (await post(gateway, token, "policy:countTokens", **ask)).json()
    first = await (await post(gateway, token, "policy:generateContent", **ask)).json()
    (candidate,) = first["candidates"]
    thought, call = candidate["content"]["parts"]
    assert thought == {"text": "\nwhere\n", "thought": True} or thought["text"].strip() == "where"
    assert (call["functionCall"]["name"], call["functionCall"]["args"]) == ("look", {"at": "box"})
    assert (candidate["finishReason"], first["modelVersion"]) == ("STOP", "policy")
    usage = first["usageMetadata"]
    assert usage["promptTokenCount"] == counted["totalTokens"]
    assert usage["thoughtsTokenCount"] > 0
    parts = ("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount")
    assert usage["totalTokenCount"] == sum(usage[part] for part in parts)
    answer = {"id": call["functionCall"]["id"], "name": "look", "response": {"result": "a key"}}
    contents += [
        candidate["content"],
        said("user", {"functionResponse": answer}, "SAY[[It is a key.]]"),
    ]
    got = await post(gateway, token, "policy:streamGenerateContent?alt=sse", **ask)
    events = [json.loads(line[6:]) for line in (await got.text()).splitlines() if line]
    texts = [part["text"] for event in events for part in parts_of(event)]
    assert "".join(texts) == "It is a key." and len(texts) > 1
    assert events[-1]["candidates"][0]["finishReason"] == "STOP"
    assert events[-1]["usageMetadata"]["candidatesTokenCount"] > 0
    contents += [said("model", "It is a key."), said("user", "And? SAY[[No more.]]")]
    array = await (await post(gateway, token, "policy:streamGenerateContent", **ask)).json()
    assert "".join(part["text"] for one in array for part in parts_of(one)) == "No more."
    async with stack.agent(gateway, token) as agent:
        await agent.close(abandon_reason="seen")
    trajectory = await recorded(stack, own_coordinator, "gemini:0:0")
    assert [turn.parent_turn for turn in trajectory.turns] == [-1, 0, 1]
    messages = json.loads(trajectory.turns[1].messages_json)["messages"]
    assert [(one["role"], one["content"]) for one in messages] == [
        ("tool", "a key"),
        ("user", "SAY[[It is a key.]]"),
    ]
    check_exact(stack, trajectory)


def parts_of(event: dict[str, Any]) -> list[Any]:
    """The parts of an event's only candidate."""
    parts: list[Any] = event["candidates"][0]["content"]["parts"]
    return parts


async def test_errors_and_models_have_googles_form(stack: GatewayStack, gateway: Instance) -> None:
    """Status and code of an error; the key in the query; names and limits of the model; and fields
    without effect in the header."""
    token = stack.token("gemini-errors:0:0")
    base = f"http://{gateway.metadata['http']}/v1beta/models"
    hi = {"contents": [said("user", "hi")]}
    for key, call, body, status, name in (
        (token, "gemini-9:generateContent", hi, 404, "NOT_FOUND"),
        ("AIza", "policy:generateContent", hi, 401, "UNAUTHENTICATED"),
        (token, "policy:generateContent", {"contents": []}, 400, "INVALID_ARGUMENT"),
        (token, "policy:countTokens", {"cachedContent": "c", **hi}, 400, "INVALID_ARGUMENT"),
    ):
        got = await post(gateway, key, call, **body)
        error = (await got.json())["error"]
        assert (got.status, error["code"], error["status"]) == (status, status, name)
        assert error["message"]
    config = {"frequencyPenalty": 0.5, "mediaResolution": "LOW", "max_output_tokens": 5, "zeal": 1}
    got = await post(gateway, token, "policy:generateContent", generation_config=config, **hi)
    told = "generationConfig.mediaResolution, generationConfig.unknown"
    assert got.headers["x-forge-ignored"] == told
    assert stack.sampled("gemini-errors:0:0")[0]["max_tokens"] == 5
    assert stack.sampled("gemini-errors:0:0")[0]["frequency_penalty"] == 0.5
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{base}?key={token}") as listed:
            models = (await listed.json())["models"]
        async with http.get(f"{base}/policy") as refused:
            assert refused.status == 401
    assert [model["name"] for model in models] == ["models/policy", "models/model"]
    assert models[0]["inputTokenLimit"] == 4096
