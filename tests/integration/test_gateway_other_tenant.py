"""The column "another session" of the access matrix: what it is accepted for is its own trajectory.

Each call that accepts session or grader tokens is made with those of another trajectory, and
names the first one wherever a request can. Rows come from the matrix: a new one needs a request.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import grpc.aio

from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc, pool_pb2
from tests.contract.test_contract_access import CLOSE, GRADERS, MATRIX, SESSIONS
from tests.support.gateway.stack import GatewayStack, recorded
from tests.support.pool.records import make_reward
from tests.support.runtime.waiting import until

FAMILY = "qwen3"
SECRET = "secret-of-alice"
FIRST, OTHER = "first:0:0", "other:0:0"
_MESSAGES = [{"role": "user", "content": "hello SAY[[mine]]"}]
_CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hello SAY[[mine]]"}]}]}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"model": "policy", "messages": _MESSAGES},
    "/v1/completions": {"model": "policy", "prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"model": "policy", "input": "go on SAY[[mine]]"},
    "/v1/messages": {"model": "policy", "messages": _MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": "policy", "messages": _MESSAGES},
    "/tokenize": {"model": "policy", "messages": _MESSAGES},
    "/detokenize": {"model": "policy", "tokens": [1]},
    "/v1/embeddings": {"model": "policy", "input": "hello"},
    "/v1/forge/close": {},
    **{
        f"/{version}/models/{{model}}:{call}": _CONTENTS
        for version in ("v1", "v1beta")
        for call in ("generateContent", "streamGenerateContent", "countTokens")
    },
}
"""By path of a POST."""
ROUTES = [call for call, accepted in MATRIX.items() if accepted & GRADERS and " " in call]
RPCS = [
    call.removeprefix("GatewayService/")
    for call, accepted in MATRIX.items()
    if accepted & SESSIONS and call.startswith("GatewayService/")
]
REQUESTS: dict[str, Any] = {
    "OpenSession": gateway_pb2.OpenSessionRequest(),
    "Chat": gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="hello SAY[[mine]]")]
    ),
    "Generate": gateway_pb2.GenerateRequest(prompt_ids=b"\1\0\0\0"),
    "Annotate": gateway_pb2.AnnotateRequest(rewards=[make_reward(value=9.0)]),
    "CloseSession": gateway_pb2.CloseSessionRequest(abandon_reason="not mine"),
}


async def answer(
    http: aiohttp.ClientSession, call: str, token: str, response_id: str
) -> tuple[int, str]:
    """Status and text of one route; it names the response of the first tenant."""
    method, _, path = call.partition(" ")
    url = path.replace("{response}", response_id).replace("{model}", "policy")
    body = BODIES[path] if method == "POST" else None
    if path == "/v1/responses" and body is not None:
        body = body | {"previous_response_id": response_id}
    headers = {"Authorization": f"Bearer {token}"}
    if call == "GET /v1/responses":
        event = {"type": "response.create", "previous_response_id": response_id}
        try:
            async with http.ws_connect(url, headers=headers) as socket:
                await socket.send_json(event | BODIES["/v1/responses"])
                return 200, json.dumps(await socket.receive_json(timeout=60))
        except aiohttp.WSServerHandshakeError as refused:
            return refused.status, str(refused)
    async with http.request(method, url, json=body, headers=headers) as got:
        return got.status, await got.text()


async def test_other_session_reaches_its_own_trajectory_alone(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """No answer has a word of the first tenant's, and its trajectory stays as it is: open, with its
    turns, without rewards. Responses that are named belong to no one else."""
    base = f"http://{gateway.metadata['http']}"
    own = stack.token(FIRST, tenant="alice")
    others = [
        stack.token(OTHER, tenant="bob"),
        stack.grader_token(OTHER, tenant="bob"),
        stack.grader_token("third:0:0", tenant="bob"),
    ]
    async with aiohttp.ClientSession(base) as http:
        headers = {"Authorization": f"Bearer {own}"}
        asked = {"model": "policy", "input": f"tell me SAY[[{SECRET}]]"}
        async with http.post("/v1/responses", json=asked, headers=headers) as got:
            response_id = (await got.json())["id"]
        await until(lambda: has_turn(stack, own_coordinator))
        before = await recorded(stack, own_coordinator, FIRST)
        assert SECRET in str(await answer(http, "GET /v1/responses/{response}", own, response_id))

        for token in others:
            for call in sorted(ROUTES, key=lambda call: call == CLOSE):
                status, text = await answer(http, call, token, response_id)
                assert SECRET not in text and FIRST not in text, call
                if "{response}" in call and token == others[0]:
                    assert status == 404, call
                if call in ("POST /v1/responses", "GET /v1/responses") and token == others[0]:
                    assert "previous_response_not_found" in text, (call, text)
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            for name in RPCS:
                for token in (stack.token("fourth:0:0", tenant="bob"), others[2]):
                    said = await outcome(stub, name, token)
                    assert SECRET not in said and FIRST not in said, name

        after = await recorded(stack, own_coordinator, FIRST)
        assert after == before
        assert (len(after.turns), len(after.rewards)) == (1, 0)
        async with http.post("/v1/forge/close", json={}, headers=headers) as got:
            assert got.status == 200, await got.text()
    client = await stack.pool_client(own_coordinator)
    request = pool_pb2.GetSummariesRequest(trajectory_ids=[FIRST, OTHER, "third:0:0"])
    found = (await client.stub.GetSummaries(request)).summaries
    await client.close()
    states = {one.trajectory_id: common_pb2.TrajectoryState.Name(one.state) for one in found}
    assert states[FIRST] == "TRAJECTORY_STATE_SEALED"
    assert OTHER in states


async def has_turn(stack: GatewayStack, coordinator: Coordinator) -> bool:
    """The answer does not wait for the disk."""
    client = await stack.pool_client(coordinator)
    request = pool_pb2.GetSummariesRequest(trajectory_ids=[FIRST])
    found = (await client.stub.GetSummaries(request)).summaries
    await client.close()
    return [one.turns for one in found] == [1]


async def outcome(stub: Any, name: str, token: str) -> str:
    """What a call returns, or its error."""
    metadata = (("authorization", f"Bearer {token}"),)
    call = getattr(stub, name)(REQUESTS[name], metadata=metadata, timeout=60)
    try:
        if hasattr(call, "__aiter__"):
            return str([each async for each in call])
        return str(await call)
    except grpc.aio.AioRpcError as error:
        return f"{error.code()} {error.details()}"
