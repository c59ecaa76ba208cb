"""OpenAI's Responses API over WebSocket, against real processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType
from openai import NotFoundError
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2
from tests.support.gateway.stack import GatewayStack, closed
from tests.support.runtime.waiting import until

FAMILY = "qwen3"
TOOL: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Patches files.",
}
CALL = (
    "<think>\nhm\n</think>\n\n<tool_call>\n"
    '{"name": "patch", "arguments": {"input":"+ a"}}\n</tool_call>'
)
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
official: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


@asynccontextmanager
async def connected(gateway: Instance, token: str) -> AsyncIterator[ClientWebSocketResponse]:
    headers = {"Authorization": f"Bearer {token}"}
    url = f"http://{gateway.metadata['http']}/v1/responses"
    async with aiohttp.ClientSession(headers=headers) as http, http.ws_connect(url) as socket:
        yield socket


async def send(socket: ClientWebSocketResponse, **asked: Any) -> None:
    await socket.send_json({"type": "response.create", "model": "policy", "store": False} | asked)


async def answer(socket: ClientWebSocketResponse) -> list[dict[str, Any]]:
    """The events of one response; all but failures are of OpenAI's own types."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(await socket.receive_json(timeout=60.0))
        # The types do not list the code of a prompt that is too long, which the API sends.
        if events[-1]["type"] not in ("error", "response.failed"):
            official.validate_python(events[-1])
    return events


async def ask(socket: ClientWebSocketResponse, **asked: Any) -> dict[str, Any]:
    """The response object of the last event, or the error event."""
    await send(socket, **asked)
    last = (await answer(socket))[-1]
    response: dict[str, Any] = last.get("response", last)
    return response


async def test_each_request_of_a_socket_sends_only_new_items(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A warm-up without output, a call, its result, another question, on one connection with
    `store: false`: one linear trajectory, and no response that another client can read."""
    asked: dict[str, Any] = {"instructions": "Be brief.", "tools": [TOOL, {"type": "web_search"}]}
    token = stack.token("socket:0:0")
    async with connected(gateway, token) as socket:
        warm = await ask(socket, input=[user("Hello.")], generate=False, **asked)
        assert (warm["status"], warm["output"]) == ("completed", [])
        await send(
            socket,
            input=[user(f"Patch. SAY[[{CALL}]]")],
            previous_response_id=warm["id"],
            **asked,
        )
        events = await answer(socket)
        assert events[0]["headers"] == {"X-Forge-Tools-Omitted": "web_search"}
        first = events[-1]["response"]
        (_, call) = first["output"]
        assert (call["type"], call["input"]) == ("custom_tool_call", "+ a")
        result = {
            "type": "custom_tool_call_output",
            "call_id": call["call_id"],
            "output": "SAY[[Done.]]",
        }
        await socket.send_json({"type": "response.processed", "response_id": first["id"]})
        second = await ask(socket, input=[result], previous_response_id=first["id"], **asked)
        assert second["output"][-1]["content"][0]["text"] == "Done."
        third = await ask(socket, input="SAY[[Bye.]]", previous_response_id=second["id"], **asked)
        assert third["output"][-1]["content"][0]["text"] == "Bye."
        # Only the latest one is kept.
        refused = await ask(socket, input="Hi.", previous_response_id=first["id"], **asked)
        assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
    async with connected(gateway, token) as other:
        refused = await ask(other, input="Hi.", previous_response_id=third["id"], **asked)
        assert refused["error"]["code"] == "previous_response_not_found"
    with pytest.raises(NotFoundError):
        await stack.openai(gateway, token).responses.retrieve(third["id"])
    trajectory = await closed(stack, own_coordinator, gateway, "socket:0:0")
    assert len(trajectory.turns) == 3
    assert [turn.parent_turn for turn in trajectory.turns] == [-1, 0, 1]


async def test_stored_responses_are_shared_with_http(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A response of a connection is continued over HTTP, and the reverse."""
    token = stack.token("shared:0:0")
    client = stack.openai(gateway, token)
    async with connected(gateway, token) as socket:
        said = "<think>\nhm\n</think>\n\nOne."
        first = await ask(socket, input=f"SAY[[{said}]]", store=True)
        second = await client.responses.create(
            model="policy", input=f"SAY[[{said}]]", previous_response_id=first["id"]
        )
        third = await ask(socket, input="And?", previous_response_id=second.id, store=True)
        assert third["status"] == "completed"
    trajectory = await closed(stack, own_coordinator, gateway, "shared:0:0")
    assert [turn.parent_turn for turn in trajectory.turns] == [-1, 0, 1]


@pytest.mark.parametrize(
    ("event", "code", "says"),
    [
        ("{", "invalid_argument", "not valid"),
        ({"type": "response.steer"}, "invalid_argument", "'response.steer'"),
        ({"type": "response.create", "input": "a"}, "model_not_found", "''"),
        (
            {"type": "response.create", "model": "policy", "input": "a", "stream_id": "b"},
            "invalid_argument",
            "stream_id",
        ),
        (
            {"type": "response.create", "model": "policy", "input": [{"type": "bad"}]},
            "invalid_argument",
            r"input[0]: items of type 'bad'",
        ),
        (
            {
                "type": "response.create",
                "model": "policy",
                "input": [{"type": "bad"}],
                "generate": False,
            },
            "invalid_argument",
            r"input[0]: items of type 'bad'",
        ),
    ],
)
async def test_error_is_an_event_and_the_connection_stays(
    stack: GatewayStack, gateway: Instance, event: Any, code: str, says: str
) -> None:
    """With the status of HTTP and the fact; the next request is answered."""
    async with connected(gateway, stack.token("errors:0:0")) as socket:
        await socket.send_str(event if isinstance(event, str) else json.dumps(event))
        (error,) = await answer(socket)
        assert error["error"]["code"] == code
        assert error["status"] == (404 if code == "model_not_found" else 400)
        assert says in error["error"]["message"]
        assert (await ask(socket, input="Hi."))["status"] == "completed"


async def test_prompt_beyond_the_context_fails_with_its_code(
    stack: GatewayStack, gateway: Instance
) -> None:
    """As in a stream over HTTP; the failed response cannot be continued, the connection can be
    used."""
    async with connected(gateway, stack.token("long:0:0")) as socket:
        first = await ask(socket, input="Hi.")
        failed = await ask(socket, input="a b c d e " * 2000, previous_response_id=first["id"])
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "context_length_exceeded"
        refused = await ask(socket, input="Hi.", previous_response_id=first["id"])
        assert refused["error"]["code"] == "previous_response_not_found"
        assert (await ask(socket, input="Hi."))["status"] == "completed"


async def test_disconnect_aborts_the_response_of_a_socket(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """The tokens sampled until then are recorded, as over HTTP."""
    token = stack.token("left:0:0")
    async with connected(gateway, token) as socket:
        await send(socket, input=f"PACE[[0.2]] SAY[[{'x' * 500}]]")
        while (await socket.receive_json(timeout=60.0))["type"] != "response.output_text.delta":
            pass

    async def aborted() -> bool:
        async with stack.agent(gateway, token) as agent:
            return bool((await agent.open()).turns)

    await until(aborted)
    trajectory = await closed(stack, own_coordinator, gateway, "left:0:0")
    (turn,) = trajectory.turns
    assert turn.finish_reason == common_pb2.FINISH_REASON_ABORTED


async def test_socket_handshake_is_refused_like_any_request(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Without a token 401; without an upgrade 426; a binary message ends the connection."""
    url = f"http://{gateway.metadata['http']}/v1/responses"
    headers = {"Authorization": f"Bearer {stack.token('shake:0:0')}"}
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect(url)
        assert caught.value.status == 401
        async with http.get(url, headers=headers) as got:
            assert got.status == 426
            assert "POST" in (await got.json())["error"]["message"]
        async with http.ws_connect(url, headers=headers) as socket:
            await socket.send_bytes(b"{}")
            assert (await socket.receive()).type is WSMsgType.CLOSE
            assert socket.close_code == 1003
