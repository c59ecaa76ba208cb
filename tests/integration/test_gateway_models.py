"""Several models behind one gateway: versions and engines on serving groups, and external APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import grpc
import grpc.aio
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from forge.client.reward_events import reward_event
from forge.core.trajectory import NO_PARENT
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support.gateway.durable_turns import until_durable
from tests.support.gateway.external_api import KEY, ExternalServer, external_server
from tests.support.gateway.models_stack import start_models
from tests.support.gateway.stack import GatewayStack, recorded, token_tree
from tests.support.runtime.waiting import until

GATEWAY = "gateway-models"


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@pytest_asyncio.fixture(scope="module")
async def api() -> AsyncIterator[ExternalServer]:
    async with external_server() as server:
        yield server


@pytest_asyncio.fixture(scope="module")
async def served(stack: GatewayStack, api: ExternalServer) -> None:
    """A gateway with models of every kind, and engines of two serving groups."""
    start_models(stack, api, GATEWAY)


@pytest_asyncio.fixture
async def gateway(stack: GatewayStack, served: None, own_coordinator: Coordinator) -> Instance:
    """Once the engines of the serving groups are there too."""
    for kind in ("router@old", "router@judges"):
        await own_coordinator.discover(kind).wait(timeout_s=120.0)
    return await stack.gateway(own_coordinator, GATEWAY)


async def said(client: AsyncOpenAI, model: str, *messages: Any, **fields: Any) -> str:
    answer = await client.chat.completions.create(model=model, messages=list(messages), **fields)
    return answer.choices[0].message.content or ""


async def test_answers_of_other_models_are_turns_that_extend_nothing(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """The policy plays against its older version; a judge with another tokenizer scores. The
    policy's history stays one line, and each answer names its turn and its model."""
    trajectory_id = "play:0:0"
    client = stack.openai(gateway, stack.token(trajectory_id, models=("old", "judge")))
    game = [user("Begin. SAY[[three]]")]
    first = await said(client, "policy", *game)
    raw = await client.chat.completions.with_raw_response.create(
        model="opponent", messages=[user(f"They said {first}. SAY[[four]]")], temperature=0
    )
    move = raw.parse().choices[0].message.content
    assert (raw.headers["x-forge-turn"], raw.headers["x-forge-model"]) == ("1", "old")
    assert "x-forge-sampling" not in raw.headers
    game += [{"role": "assistant", "content": first}, user(f"{move}! SAY[[five]]")]
    second = await said(client, "policy", *game)
    stream = await client.chat.completions.create(
        model="judge", messages=[user(f"{second}? SAY[[good]]")], stream=True
    )
    verdict = "".join([piece.choices[0].delta.content or "" async for piece in stream])
    assert (first, move, second, verdict) == ("three", "four", "five", "good")
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        assert await agent.close(reward_event("won", 1.0), min_turns=4, after_agent_s=0) == 4
    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    one, opponent, two, judge = trajectory.turns
    assert [turn.other_model.name for turn in trajectory.turns] == ["", "old", "", "judge"]
    assert (two.parent_turn, opponent.parent_turn, judge.parent_turn) == (0, NO_PARENT, NO_PARENT)
    tree = token_tree(trajectory)
    assert tree.context(2).startswith(tree.sequence(0))
    for turn, kind, answer in ((opponent, "version", "four"), (judge, "engine", "good")):
        assert turn.HasField("other_model") and turn.other_model.kind == kind
        assert (turn.prompt_ids, turn.sampled.ids) == (b"", b"")
        assert turn.other_model.sampled_tokens > len(answer) - 1
        record = json.loads(turn.messages_json)
        assert record["answer"] == {"role": "assistant", "content": answer}
        assert len(record["messages"]) == 1
    assert opponent.temperature == 0
    assert one.HasField("turns_before") and [t.turns_before for t in trajectory.turns] == [
        0,
        1,
        2,
        3,
    ]


async def test_session_is_rebuilt_with_turns_of_other_models(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Another gateway continues the policy's history and the numbers of the turns."""
    trajectory_id = "rebuilt:0:0"
    token = stack.token(trajectory_id)
    here = stack.openai(gateway, token)
    first = await said(here, "policy", user("SAY[[one]]"))
    assert await said(here, "old", user("SAY[[two]]")) == "two"
    plain = await stack.gateway(own_coordinator)
    there = stack.openai(plain, token)
    async with stack.agent(gateway, token) as agent:
        assert (await agent.open()).turns == 2
    await until_durable(stack, own_coordinator, trajectory_id, 2)
    history = [user("SAY[[one]]"), {"role": "assistant", "content": first}, user("SAY[[three]]")]
    raw = await there.chat.completions.with_raw_response.create(model="policy", messages=history)
    assert raw.headers["x-forge-turn"] == "2"
    async with stack.agent(gateway, token) as agent:
        await agent.close(reward_event("done", 1.0), min_turns=3, after_agent_s=0)
    turns = (await recorded(stack, own_coordinator, trajectory_id)).turns
    assert [turn.parent_turn for turn in turns] == [NO_PARENT, NO_PARENT, 0]


async def test_task_decides_which_models_its_sessions_call(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Without names the open ones; with names those alone, also of models that are not open. A
    refusal has the protocol's form and names the field; the list has what may be called."""
    default = stack.openai(gateway, stack.token("default:0:0"))
    named = stack.openai(gateway, stack.token("named:0:0", models=("judge",)))
    listed = {model.id async for model in default.models.list()}
    assert listed >= {"policy", "old", "opponent", "big"} and "judge" not in listed
    assert {model.id async for model in named.models.list()} == {"policy", "model", "judge"}
    assert await said(named, "judge", user("SAY[[yes]]")) == "yes"
    assert await said(named, "policy", user("SAY[[yes]]")) == "yes"
    with pytest.raises(openai.PermissionDeniedError, match=r"'judge' is not for.*open = true"):
        await said(default, "judge", user("hi"))
    for model in ("old", "big"):
        with pytest.raises(openai.PermissionDeniedError, match=r"models = \['judge'\]"):
            await said(named, model, user("hi"))
    with pytest.raises(openai.NotFoundError, match="'gpt-4o' is not served here"):
        await said(default, "gpt-4o", user("hi"))
    claude = stack.anthropic(gateway, stack.token("named:0:0", models=("judge",)))
    with pytest.raises(anthropic.PermissionDeniedError, match="'claude' is not for this session"):
        await claude.messages.create(model="claude", max_tokens=9, messages=[user("hi")])
    described = await default.models.retrieve("big")
    assert (described.id, getattr(described, "context_tokens", None)) == ("big", None)


async def test_grpc_requests_name_a_model(stack: GatewayStack, gateway: Instance) -> None:
    """Chat and Generate by `model`; an external API is refused there."""
    token = stack.token("grpc:0:0")
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),)

        async def chat(model: str) -> Any:
            message = gateway_pb2.ChatMessage(role="user", content="SAY[[hm]]")
            request = gateway_pb2.ChatRequest(messages=[message], model=model)
            return [one async for one in stub.Chat(request, metadata=metadata)][-1]

        answers = [await chat(model) for model in ("", "old")]
        assert [answer.message.content for answer in answers] == ["hm", "hm"]
        assert [answer.turn_index for answer in answers] == [0, 1]
        for model, code in (
            ("big", grpc.StatusCode.INVALID_ARGUMENT),
            ("judge", grpc.StatusCode.PERMISSION_DENIED),
            ("none", grpc.StatusCode.NOT_FOUND),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await chat(model)
            assert refused.value.code() is code


async def test_external_answer_is_passed_through_and_recorded(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, api: ExternalServer
) -> None:
    """Complete and streamed, in both protocols, with the operator's key and no header of the agent;
    parameters that the gateway does not know pass."""
    trajectory_id = "external:0:0"
    token = stack.token(trajectory_id)
    client, claude = stack.openai(gateway, token), stack.anthropic(gateway, token)
    api.requests.clear()
    raw = await client.chat.completions.with_raw_response.create(
        model="big",
        messages=[user("ok")],
        extra_body={"exotic": 1.50},
        extra_headers={"X-Own": "secret", "Cookie": "a=b"},
    )
    assert raw.parse().choices[0].message.content == "Hello you"
    assert (raw.headers["x-forge-turn"], raw.headers["x-forge-model"]) == ("0", "big")
    async with client.chat.completions.with_streaming_response.create(
        model="big", messages=[user("ok")], stream=True
    ) as streamed:
        lines = [line async for line in streamed.iter_lines() if line]
    assert lines[-2:] == [": X-Forge-Turn: 1", "data: [DONE]"]
    assert len(lines) == 6
    message = await claude.messages.create(model="claude", max_tokens=9, messages=[user("ok")])
    assert message.usage.output_tokens == 3
    async with claude.messages.stream(
        model="claude", max_tokens=9, messages=[user("ok")]
    ) as events:
        assert await events.get_final_text() == "Hello you"
    counted = await claude.messages.count_tokens(model="claude", messages=[user("ok")])
    assert counted.input_tokens == 12
    vectors = await client.embeddings.create(model="vectors", input="text", encoding_format="float")
    assert vectors.data[0].embedding == [0.5, -0.5]
    for path, headers, body in api.requests:
        assert token not in json.dumps([headers, body])
        assert not {"X-Own", "Cookie", "X-Forge-Agent"} & headers.keys()
        if "/messages" in path:
            assert headers["x-api-key"] == KEY and headers["anthropic-version"]
            assert "Authorization" not in headers
        elif path != "/v1/embeddings":
            assert headers["Authorization"] == f"Bearer {KEY}"
            assert body["model"] == "big-1"
    assert api.requests[0][2]["exotic"] == 1.5
    async with stack.agent(gateway, token) as agent:
        assert await agent.close(reward_event("done", 1.0), min_turns=5, after_agent_s=0) == 5
    turns = (await recorded(stack, own_coordinator, trajectory_id)).turns
    assert [turn.other_model.name for turn in turns] == [
        "big",
        "big",
        "claude",
        "claude",
        "vectors",
    ]
    for turn in turns[:4]:
        assert (turn.other_model.prompt_tokens, turn.other_model.sampled_tokens) == (11, 3)
        assert turn.finish_reason == common_pb2.FINISH_REASON_STOP
        assert "ok" in json.loads(turn.messages_json)["request"]
    assert "Hello you" in json.loads(turns[0].messages_json)["response"]
    assert "data: [DONE]" in json.loads(turns[1].messages_json)["response"]
    assert "response" not in json.loads(turns[4].messages_json)
    assert KEY not in stack.log_of(GATEWAY).read_text()


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("status 400", 400, r"wrong with \*\*\*"),
        ("status 401", 502, r"refuses the operator's key \(401\)"),
        ("status 403", 502, r"refuses the operator's key \(403\)"),
        ("status 429", 429, "limits the rate of calls"),
        ("status 302", 502, "answers with status 302"),
        ("status 500", 503, "answers with status 500"),
        ("status 529", 503, "answers with status 529"),
        ("large", 502, "max_response_mib = 0.1"),
        ("slow", 504, "did not finish within 3 s"),
    ],
)
async def test_failure_of_an_external_api_has_a_status_of_its_own(
    stack: GatewayStack, gateway: Instance, script: str, status: int, words: str
) -> None:
    """The agent's own error keeps its body; a refused key is not the agent's and never shown."""
    token = stack.token(f"fails-{script.replace(' ', '-')}:0:0")
    client = stack.openai(gateway, token)
    model = "hasty" if script == "slow" else "big"
    with pytest.raises(openai.APIStatusError, match=words) as refused:
        await said(client, model, user(script))
    assert refused.value.status_code == status
    assert KEY not in refused.value.response.text
    if status == 429:
        assert refused.value.response.headers["retry-after"] == "7"
    async with stack.agent(gateway, token) as agent:
        assert (await agent.open()).turns == (1 if script == "large" else 0)


async def test_unreachable_api_and_wrong_call_are_named(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Without an address of the operator's network."""
    client = stack.openai(gateway, stack.token("wrong:0:0"))
    with pytest.raises(openai.InternalServerError, match="its API cannot be reached") as refused:
        await said(client, "gone", user("ok"))
    assert refused.value.status_code == 503 and "127.0.0.1" not in refused.value.response.text
    for model, words in (
        ("claude", "it is called by POST /v1/messages"),
        ("vectors", "it is called by POST /v1/embeddings"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            await said(client, model, user("ok"))
    for model in ("policy", "old"):
        with pytest.raises(openai.BadRequestError, match="has no embeddings here"):
            await client.embeddings.create(model=model, input="text")


@pytest.mark.parametrize("script", ["cut", "cut hard"])
async def test_cut_stream_ends_with_an_error_event_and_a_partial_record(
    stack: GatewayStack,
    gateway: Instance,
    own_coordinator: Coordinator,
    script: str,
) -> None:
    """However its connection ends; the turn counts as aborted."""
    trajectory_id = f"{script.replace(' ', '-')}:0:0"
    token = stack.token(trajectory_id)
    stream = await stack.openai(gateway, token).chat.completions.create(
        model="big", messages=[user(script)], stream=True
    )
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match="ended in mid-answer"):
        async for piece in stream:
            pieces += [piece.choices[0].delta.content or ""]
    assert pieces == ["Hel", "lo "]
    async with stack.agent(gateway, token) as agent:
        assert await agent.close(reward_event("done", 1.0), min_turns=1, after_agent_s=0) == 1
    (turn,) = (await recorded(stack, own_coordinator, trajectory_id)).turns
    assert turn.finish_reason == common_pb2.FINISH_REASON_ABORTED


async def test_answer_that_the_agent_leaves_is_recorded_so_far(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """As an aborted turn, with the events that came; its call counts no longer."""
    trajectory_id = "leaves:0:0"
    token = stack.token(trajectory_id)
    client = stack.openai(gateway, token)
    stream = await client.chat.completions.create(
        model="waits", messages=[user("hang")], stream=True
    )
    pieces = aiter(stream)
    assert (await anext(pieces)).choices[0].delta.content == "Hel"
    await stream.close()
    async with stack.agent(gateway, token) as agent:

        async def is_recorded() -> bool:
            return (await agent.open()).turns == 1

        await until(is_recorded)
        assert await said(client, "waits", user("ok")) == "Hello you"
        assert await agent.close(reward_event("done", 1.0), min_turns=2, after_agent_s=0) == 2
    left, _ = (await recorded(stack, own_coordinator, trajectory_id)).turns
    assert left.finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert "Hel" in json.loads(left.messages_json)["response"]


async def test_calls_of_an_api_are_bounded_and_end_with_their_session(
    stack: GatewayStack, gateway: Instance, api: ExternalServer
) -> None:
    """A call above `max_calls` is refused at once, and one above the limit of its tenant, which
    counts all models; a close aborts the call in flight."""
    token = stack.token("bounded:0:0", tenant="limited")
    client = stack.openai(gateway, token)
    api.began_slow.clear()
    slow = asyncio.create_task(said(client, "waits", user("slow")))
    await api.began_slow.wait()
    anyone = stack.openai(gateway, stack.token("anyone:0:0"))
    with pytest.raises(openai.RateLimitError, match="'waits' has 1 calls in flight, its maximum"):
        await said(anyone, "waits", user("ok"))
    for model in ("policy", "big"):
        with pytest.raises(openai.RateLimitError, match="this user has 1 calls in flight"):
            await said(client, model, user("ok"))
    async with stack.agent(gateway, token) as agent:
        assert await agent.close(reward_event("done", 1.0), min_turns=0, after_agent_s=0) == 0
    with pytest.raises(openai.ConflictError, match="closed during this call"):
        await slow


async def test_token_in_the_path_reaches_other_models(
    stack: GatewayStack, gateway: Instance
) -> None:
    """As it reaches the policy."""
    base = f"http://{gateway.metadata['http']}/s/{stack.token('path:0:0')}/v1"
    body = {"model": "big", "messages": [user("ok")]}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{base}/chat/completions", json=body) as answer,
    ):
        assert (answer.status, answer.headers["x-forge-turn"]) == (200, "0")


def test_gateway_refuses_a_key_that_others_may_read(stack: GatewayStack, tmp_path: Path) -> None:
    """At its start, with the setting and the remedy."""
    key_file = tmp_path / "key"
    key_file.write_text("k")
    key_file.chmod(0o644)
    model = {"kind": "external", "url": "https://api.invalid/v1", "key_file": str(key_file)}
    stack.start_gateway("gateway-open", "--models", json.dumps({"strange": model}))
    assert stack.processes.pop("gateway-open").wait(timeout=120) == 2
    assert "chmod o=" in stack.log_of("gateway-open").read_text()
