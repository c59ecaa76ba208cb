"""What a gateway refuses, and how it says so: unmodified SDKs against real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from openai import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
)

from forge.core.errors import ContextTooLong, InvalidArgument, ResourceExhausted, Unauthenticated
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support.clients.programs import context_text
from tests.support.gateway.stack import START_S, GatewayStack, recorded


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"\xff\xfe{", 400, "not valid"),
        (b"[]", 400, "not valid"),
        (b'{"model": "policy", "messages": []}', 400, "must not be empty"),
        (b'{"model": "policy", "messages": [{"role": "king"}]}', 400, "king"),
        (b'{"model": "policy", "messages": [{"role": 7}]}', 400, "$.messages[0].role"),
        (b'{"model": "policy", "messages": "hi"}', 400, "got `str` - at `$.messages`"),
        (b'{"model": "policy", "messages": null}', 400, "got `null` - at `$.messages`"),
        (b'{"model": "policy", "messages": ' + b"[" * 100_000, 400, "not valid"),
        (b'{"model": "policy", "messages": [{"role":"user"}], "n": 0.5}', 400, "$.n"),
        (b'{"model": "policy", "messages": [{"role":"user"}], "top_p": 7}', 400, "top_p = 7"),
        (b'{"model": "policy", "messages": [{"role":"user"}], "n": 0}', 400, "n = 0 must be"),
        (
            b'{"model": "policy", "messages": [{"role":"user"}], "max_tokens": 0}',
            400,
            "max_tokens = 0 must be from 1 to 2147483647",
        ),
        (
            b'{"model": "policy", "messages": [{"role":"user","content":[{"type":"audio"}]}]}',
            400,
            "text only",
        ),
        (b'{"model": "policy", "messages": [{"role":"user"}], "tools": [{}]}', 400, "tools[0]"),
        (
            b'{"model":"policy","messages":[{"role":"user"}],"tool_choice":"required"}',
            400,
            "no tools",
        ),
    ],
)
async def test_invalid_request_is_refused_with_its_fault(
    stack: GatewayStack, gateway: Instance, body: bytes, status: int, says: str
) -> None:
    """Each kind of bad request gets an OpenAI error object."""
    headers = {"Authorization": f"Bearer {stack.token('garbage:0:0')}"}
    url = f"http://{gateway.metadata['http']}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=headers) as got:
        error = (await got.json())["error"]
    assert (got.status, error["type"]) == (status, "invalid_request_error")
    assert says in error["message"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/audio", 404, "POST /v1/audio: Not Found"),
        (
            "/chat/completions",
            404,
            "POST /chat/completions: Not Found; the base URL must end with /v1",
        ),
        (
            "/v1/v1/messages",
            404,
            "POST /v1/v1/messages: Not Found; the client adds /v1 to the base URL: leave it out",
        ),
        ("/v1/models", 405, "POST /v1/models: Method Not Allowed; use GET or HEAD"),
        ("/v1beta/models/x:sing", 405, "POST /v1beta/models/x:sing: Method Not Allowed"),
    ],
)
async def test_wrong_address_is_named_as_it_was_sent(
    gateway: Instance, path: str, status: int, says: str
) -> None:
    """With the remedy of a base URL that lacks /v1, or has it twice."""
    url = f"http://{gateway.metadata['http']}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json={}) as got:
        assert (got.status, got.reason) == (status, says.partition(": ")[2].partition(";")[0])
        assert says in (await got.json())["error"]["message"]
        assert ("Allow" in got.headers) == (status == 405)


async def test_session_token_in_a_wrong_address_is_not_echoed(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Errors end in logs of agents."""
    token = stack.token("echo:0:0")
    url = f"http://{gateway.metadata['http']}/s/{token}/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json={}) as got:
        message = (await got.json())["error"]["message"]
    assert message == "POST /chat/completions: Not Found; the base URL must end with /v1"


async def test_wrong_model_and_wrong_tokens_have_their_own_errors(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Unknown model, no token, a forged, an expired and a foreign one: the SDK's exceptions."""
    ask: dict[str, Any] = {"messages": [user("hi")], "model": "policy"}
    client = stack.openai(gateway, stack.token("errors:0:0"))
    with pytest.raises(NotFoundError, match="'model' is"):
        await client.chat.completions.create(**(ask | {"model": "gpt-7"}))
    with pytest.raises(AuthenticationError, match="not one of this cluster"):
        await stack.openai(gateway, "sk-123").chat.completions.create(**ask)
    expired = stack.token("errors:0:0", expires_unix_s=1.0)
    with pytest.raises(AuthenticationError, match="expired"):
        await stack.openai(gateway, expired).chat.completions.create(**ask)
    foreign = stack.token("errors:0:0", scopes=frozenset({"operator"}))
    with pytest.raises(PermissionDeniedError):
        await stack.openai(gateway, foreign).chat.completions.create(**ask)
    with pytest.raises(Unauthenticated):
        await stack.agent(gateway, expired).open()


async def test_prompt_beyond_the_context_is_refused_with_both_numbers(
    stack: GatewayStack, gateway: Instance
) -> None:
    """On both surfaces, with limit and length."""
    token = stack.token("long:0:0")
    words = user("a b c d e " * 2000)
    with pytest.raises(BadRequestError, match="4096") as caught:
        await stack.openai(gateway, token).chat.completions.create(
            model="policy",
            messages=[words],  # type: ignore[list-item]
        )
    assert caught.value.code == "context_length_exceeded"
    async with stack.agent(gateway, token) as agent:
        with pytest.raises(ContextTooLong, match=r"\d+ tokens > 4095 maximum"):
            await agent.chat([words])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", '"messages": [{"role": "user", "content": "%s"}]'),
        ("responses", '"input": [{"role": "user", "content": "%s"}]'),
        ("messages", '"max_tokens": 9, "messages": [{"role": "user", "content": "%s"}]'),
    ],
)
async def test_half_of_a_cut_character_is_replaced(
    stack: GatewayStack, own_coordinator: Coordinator, gateway: Instance, path: str, body: str
) -> None:
    """JavaScript's `slice` may leave a lone surrogate: the model reads U+FFFD, in each protocol."""
    trajectory_id = f"half-{path.partition('/')[0]}:0:0"
    headers = {"Authorization": f"Bearer {stack.token(trajectory_id)}"}
    url = f"http://{gateway.metadata['http']}/v1/{path}"
    text = r"cut: \ud83d, whole: \ud83d\ude00"
    data = '{"model": "policy", %s}' % (body % text)
    async with aiohttp.ClientSession() as http, http.post(url, data=data, headers=headers) as got:
        assert got.status == 200, await got.text()
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        await agent.close()
    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    assert "cut: \ufffd, whole: \U0001f600" in context_text(stack, trajectory, 0)


async def test_context_of_a_domain_limits_its_sessions(
    stack: GatewayStack, gateway: Instance
) -> None:
    """A session whose token has a shorter context reports it, is refused beyond it, and samples up
    to it."""
    token = stack.token("short:0:0", context_tokens=64)
    client = stack.openai(gateway, token)
    for listed in (await client.models.list()).data:
        assert listed.to_dict()["context_tokens"] == 64
    answer = await client.chat.completions.create(
        model="policy",
        messages=[user("hello")],  # type: ignore[list-item]
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 64
    with pytest.raises(
        BadRequestError, match="is 64 tokens, answer included, as set for domain code"
    ) as caught:
        await client.chat.completions.create(
            model="policy",
            messages=[user("a b c d e " * 100)],  # type: ignore[list-item]
        )
    assert caught.value.code == "context_length_exceeded"


async def test_unretryable_conflict_is_not_retried_by_the_sdk(
    stack: GatewayStack, gateway: Instance
) -> None:
    """The SDK would repeat any 409; a header forbids it."""
    token = stack.token("conflict:0:0")
    async with stack.agent(gateway, token) as agent:
        await agent.close(abandon_reason="never begun")
    client = stack.openai(gateway, token, max_retries=5)
    with pytest.raises(APIStatusError) as caught:
        await client.chat.completions.create(model="policy", messages=[user("hi")])  # type: ignore[list-item]
    assert caught.value.status_code == 409
    assert "x-stainless-retry-count" in caught.value.request.headers
    assert caught.value.request.headers["x-stainless-retry-count"] == "0"


async def test_missing_model_directory_is_one_line(stack: GatewayStack, tmp_path: Path) -> None:
    """Exit code 2."""
    stack.start_gateway("gateway-broken", "--model-path", str(tmp_path))
    process = stack.processes.pop("gateway-broken")
    assert await asyncio.to_thread(process.wait, START_S) == 2


async def test_invalid_grpc_request_is_refused_with_its_fault(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Invalid ids, roles and tools: INVALID_ARGUMENT, and the session continues."""
    token = stack.token("garbage:1:0")
    async with stack.agent(gateway, token) as agent:
        for ids in ([], [-1], [1_000_000]):
            with pytest.raises(InvalidArgument, match="prompt_ids"):
                await agent.generate(ids)
        with pytest.raises(InvalidArgument, match="king"):
            await agent.chat([{"role": "king", "content": "hi"}])
        with pytest.raises(InvalidArgument, match="empty"):
            await agent.chat([])
        with pytest.raises(InvalidArgument, match="stop has 17 strings"):
            await agent.chat([user("hi")], stop=[str(at) for at in range(17)])
        with pytest.raises(InvalidArgument, match="event_id"):
            await agent.annotate(common_pb2.RewardEvent(name="nameless"))
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            chat = gateway_pb2_grpc.GatewayServiceStub(channel).Chat(
                gateway_pb2.ChatRequest(
                    messages=[gateway_pb2.ChatMessage(role="user", content="hi")], tools_json="{"
                ),
                metadata=(("authorization", f"Bearer {token}"),),
            )
            with pytest.raises(grpc.aio.AioRpcError, match="tools_json"):
                await chat.read()
        assert (await agent.chat([user("SAY[[still here]]")])).text == "still here"


async def test_a_tenant_above_its_rate_gets_a_hint(
    stack: GatewayStack, own_coordinator: Coordinator
) -> None:
    """429 with Retry-After over HTTP, RESOURCE_EXHAUSTED with retry-after-ms over gRPC; other
    sessions of the tenant too, and other tenants go on."""
    limits = ("--tenants.calls-per-s-of", "ada=0.001", "--tenants.burst-calls", "1")
    sizes = ("--tenants.max-request-mib-of", "eve=0.001")
    stack.start_gateway("gateway-limited", *limits, *sizes)
    limited = await stack.gateway(own_coordinator, "gateway-limited")
    ask: dict[str, Any] = {"model": "policy", "messages": [user("hi")]}
    ada = stack.openai(limited, stack.token("ada:0:0", tenant="ada"))
    await ada.chat.completions.create(**ask)
    with pytest.raises(RateLimitError, match="this user begins more than") as caught:
        await stack.openai(limited, stack.token("ada:1:0", tenant="ada")).chat.completions.create(
            **ask
        )
    assert 900 < int(caught.value.response.headers["retry-after"]) <= 1000
    async with stack.agent(limited, stack.token("ada:2:0", tenant="ada")) as agent:
        with pytest.raises(ResourceExhausted, match="per second") as exhausted:
            await agent.chat([user("hi")])
        assert 900 < (exhausted.value.retry_after_s or 0) <= 1000
    await stack.openai(limited, stack.token("bob:0:0")).chat.completions.create(**ask)
    async with stack.agent(limited, stack.token("eve:0:0", tenant="eve")) as agent:
        with pytest.raises(InvalidArgument, match="a request of this user has at most"):
            await agent.chat([user("a" * 2000)])
    stack.kill("gateway-limited")
