"""Processes around a session die: no acknowledged turn is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx2
import pytest
import pytest_asyncio
from openai import APIError, APIStatusError, RateLimitError

from forge.core.token_columns import int32_bytes
from forge.runtime.coordination import Coordinator
from forge.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support.gateway.durable_turns import durable_turns, until_durable
from tests.support.gateway.stack import (
    SHARD,
    START_S,
    GatewayStack,
    check_exact,
    recorded,
    token_tree,
)
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.faults


@pytest.fixture
def coordinator(own_coordinator: Coordinator) -> Coordinator:
    """Of the file's stack."""
    return own_coordinator


@pytest_asyncio.fixture
async def engine(stack: GatewayStack, coordinator: Coordinator) -> AsyncIterator[str]:
    """The only engine of the stack, for the test to kill; `<name>-next` takes its place."""
    (name,) = (name for name in stack.processes if name.startswith("engine"))
    await stack.gateway(coordinator)
    yield name
    stack.kill(name)
    if f"{name}-next" not in stack.processes:
        stack.start_engine(f"{name}-next")
    await stack.gone(coordinator, "router", name)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def ask(client: Any, history: list[Any], **settings: Any) -> str:
    """One turn; the answer is appended to the history."""
    answer = await client.chat.completions.create(model="policy", messages=history, **settings)
    content = str(answer.choices[0].message.content)
    history.append({"role": "assistant", "content": content})
    return content


async def test_killed_gateway_is_replaced_by_another(
    stack: GatewayStack, coordinator: Coordinator
) -> None:
    """After kill -9 a second gateway continues the session, its prefix still exact."""
    trajectory_id = "handover:0:0"
    token = stack.token(trajectory_id)
    stack.start_gateway("killed")
    first = await stack.gateway(coordinator, "killed")
    history = [user("SAY[[one]]")]
    assert await ask(stack.openai(first, token), history) == "one"
    history.append(user("SAY[[two]]"))
    assert await ask(stack.openai(first, token), history) == "two"
    await until_durable(stack, coordinator, trajectory_id, 2)
    stack.kill("killed")
    second = await stack.gateway(coordinator)
    history.append(user("SAY[[three]]"))
    assert await ask(stack.openai(second, token), history) == "three"
    async with stack.agent(second, token) as agent:
        assert agent.info is not None
        assert agent.info.turns == 3
        await agent.close(min_turns=3)
    trajectory = await recorded(stack, coordinator, trajectory_id)
    check_exact(stack, trajectory)
    assert [turn.parent_turn for turn in trajectory.turns] == [-1, 0, 1]
    lengths = token_tree(trajectory).lengths
    assert [turn.prefix_tokens for turn in trajectory.turns] == [0, lengths[0], lengths[1]]


async def test_agent_sees_one_error_when_its_gateway_is_killed(
    stack: GatewayStack, coordinator: Coordinator
) -> None:
    """Killed in mid-answer, a gateway costs its agent one failed call, which another gateway then
    answers; earlier turns keep their ids, and the failed call has no turn."""
    trajectory_id = "failover:0:0"
    token = stack.token(trajectory_id)
    stack.start_gateway("cut-off")
    first = stack.openai(await stack.gateway(coordinator, "cut-off"), token)
    history = [user("SAY[[one]]")]
    await ask(first, history)
    await until_durable(stack, coordinator, trajectory_id, 1)
    history.append(user("PACE[[60]] SAY[[a long answer]]"))
    streamed = await first.chat.completions.create(model="policy", messages=history, stream=True)
    await anext(aiter(streamed))
    stack.kill("cut-off")
    with pytest.raises((APIError, httpx2.TransportError)):
        async for _ in streamed:
            pass
    second = stack.openai(await stack.gateway(coordinator), token)
    assert await ask(second, history) == "a long answer"
    history.append(user("SAY[[three]]"))
    assert await ask(second, history) == "three"
    async with stack.agent(await stack.gateway(coordinator), token) as agent:
        assert await agent.close(min_turns=3) == 3
    trajectory = await recorded(stack, coordinator, trajectory_id)
    # The engine notices the closed connection after some tokens.
    await until(lambda: len(stack.sampled(trajectory_id)) >= 4)
    check_exact(stack, trajectory, lost=1)
    assert [turn.parent_turn for turn in trajectory.turns] == [-1, 0, 1]


async def test_two_gateways_can_serve_one_session(
    stack: GatewayStack, coordinator: Coordinator
) -> None:
    """A client that spreads its calls over two gateways loses no turn and doubles none, though both
    number the turns of the same session."""
    trajectory_id = "spread:0:0"
    token = stack.token(trajectory_id)
    stack.start_gateway("gateway-1")
    clients = [
        stack.openai(await stack.gateway(coordinator, name), token)
        for name in ("gateway-0", "gateway-1")
    ]
    history: list[Any] = []
    for round_ in range(4):
        forks = [[*history, user(f"SAY[[{number} in {round_}]] {number}")] for number in range(6)]
        answers = await asyncio.gather(
            *(ask(clients[number % 2], fork) for number, fork in enumerate(forks))
        )
        assert answers == [f"{number} in {round_}" for number in range(6)]
        # The next round goes on from an answer that one of the two has never seen.
        history = forks[round_ % 2]
    await until_durable(stack, coordinator, trajectory_id, 24)
    async with stack.agent(await stack.gateway(coordinator, "gateway-1"), token) as agent:
        assert await agent.close(min_turns=24) == 24
    trajectory = await recorded(stack, coordinator, trajectory_id)
    check_exact(stack, trajectory)
    logs = [stack.log_of(name).read_text() for name in ("gateway-0", "gateway-1")]
    assert any('"turn_contested"' in log for log in logs)


async def test_answer_survives_the_death_of_its_router(
    stack: GatewayStack, coordinator: Coordinator, engine: str
) -> None:
    """An answer that the agent has not seen is sampled again elsewhere, and recorded once."""
    trajectory_id = "router:0:0"
    token = stack.token(trajectory_id)
    client = stack.openai(await stack.gateway(coordinator), token)
    asking = asyncio.create_task(ask(client, [user(f"FAIL[[{engine}]] SAY[[survived]]")]))
    await asyncio.to_thread(stack.processes[engine].wait, START_S)
    stack.start_engine(f"{engine}-next")
    assert await asking == "survived"
    async with stack.agent(await stack.gateway(coordinator), token) as agent:
        assert await agent.close() == 1


async def test_unstreamed_answer_of_a_lost_router_is_returned_once(
    stack: GatewayStack, coordinator: Coordinator, engine: str
) -> None:
    """With stop strings tokens arrive one by one; whole answers over gRPC have nothing of the lost
    attempt, and are one response."""
    token = stack.token("once:0:0")
    gateway = await stack.gateway(coordinator)
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        asked = gateway_pb2.ChatRequest(
            messages=[
                gateway_pb2.ChatMessage(role="user", content=f"FAIL[[{engine}]] SAY[[abcdef]]")
            ],
            stop=["e"],
        )
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        credential = [("authorization", f"Bearer {token}")]
        reading = asyncio.create_task(
            _all_of(stub.Chat(asked, metadata=credential, timeout=START_S))
        )
        await asyncio.to_thread(stack.processes[engine].wait, START_S)
        stack.start_engine(f"{engine}-next")
        (answer,) = await reading
        ids = gateway_pb2.GenerateRequest(prompt_ids=int32_bytes([1, 2, 3]))
        (sampled,) = await _all_of(stub.Generate(ids, metadata=credential, timeout=START_S))
    assert (answer.delta, answer.message.content) == ("abcd", "abcd")
    assert len(sampled.tokens.ids) == len(sampled.tokens.logprobs) == 4 * len("ok.")
    assert (sampled.finish_reason, sampled.turn_index) == (common_pb2.FINISH_REASON_STOP, 1)


async def _all_of(call: Any) -> list[Any]:
    return [response async for response in call]


async def test_half_streamed_answer_ends_with_an_error_and_is_recorded(
    stack: GatewayStack, coordinator: Coordinator, engine: str
) -> None:
    """The agent gets an error, and the record has the part that it saw."""
    trajectory_id = "halfway:0:0"
    token = stack.token(trajectory_id)
    gateway = await stack.gateway(coordinator)
    stream = await stack.openai(gateway, token).chat.completions.create(
        model="policy", messages=[user("PACE[[60]] SAY[[abcdef]]")], stream=True
    )
    # What begins the answer goes out with its first token.
    await anext(aiter(stream))
    stack.processes[engine].kill()
    seen = ""
    with pytest.raises(APIError):
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
    assert seen == "a"
    async with stack.agent(gateway, token) as agent:
        assert await agent.close() == 1
    (turn,) = (await recorded(stack, coordinator, trajectory_id)).turns
    assert turn.finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert len(turn.sampled.ids) == 4


async def test_turns_wait_for_a_killed_pool(stack: GatewayStack, coordinator: Coordinator) -> None:
    """Answers continue while the pool is down; the close waits for it, and has every turn."""
    trajectory_id = "away:0:0"
    token = stack.token(trajectory_id)
    gateway = await stack.gateway(coordinator)
    client = stack.openai(gateway, token)
    history = [user("SAY[[before]]")]
    await ask(client, history)
    stack.pool.kill()
    for number in range(3):
        history.append(user(f"SAY[[meanwhile {number}]]"))
        assert await ask(client, history) == f"meanwhile {number}"
    async with stack.agent(gateway, token) as agent:
        closing = asyncio.create_task(agent.close(min_turns=4))
        stack.pool.start()
        assert await closing == 4
    check_exact(stack, await recorded(stack, coordinator, trajectory_id))


async def test_stopping_gateway_finishes_its_calls(
    stack: GatewayStack, coordinator: Coordinator
) -> None:
    """SIGTERM lets the running call end, makes its turn durable, and exits with 0."""
    trajectory_id = "drain:0:0"
    stack.start_gateway("stopped")
    gateway = await stack.gateway(coordinator, "stopped")
    stream = await stack.openai(gateway, stack.token(trajectory_id)).chat.completions.create(
        model="policy", messages=[user("PACE[[0.02]] SAY[[to the very end]]")], stream=True
    )
    process = stack.processes["stopped"]
    said = ""
    async for chunk in stream:
        if not said:
            process.send_signal(signal.SIGTERM)
        said += chunk.choices[0].delta.content or ""
    assert said == "to the very end"
    assert await asyncio.to_thread(process.wait, START_S) == 0
    assert await durable_turns(stack, coordinator, trajectory_id) == 1


async def test_overload_is_refused_with_a_hint(
    stack: GatewayStack, coordinator: Coordinator
) -> None:
    """Beyond calls.max_calls a call gets 429 and Retry-After, and the SDK's retry succeeds."""
    stack.start_gateway("one-call", "--calls.max-calls", "1")
    gateway = await stack.gateway(coordinator, "one-call")
    slow = await stack.openai(gateway, stack.token("busy:0:0")).chat.completions.create(
        model="policy", messages=[user("PACE[[60]] SAY[[zz]]")], stream=True
    )
    token = stack.token("busy:1:0")
    with pytest.raises(RateLimitError) as caught:
        await ask(stack.openai(gateway, token), [user("SAY[[now]]")])
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    patient = stack.openai(gateway, token, max_retries=10)
    asking = asyncio.create_task(ask(patient, [user("SAY[[later]]")]))
    await stack.logged("one-call", '"status": 429', times=2)
    await slow.close()
    assert await asking == "later"


@pytest.fixture(scope="module")
def small(stack: GatewayStack) -> str:
    """A gateway for short bodies and one session in memory."""
    stack.start_gateway("small", "--http.max-body-mib", "0.01", "--sessions.max-sessions", "1")
    return "small"


async def test_oversized_body_is_refused(
    stack: GatewayStack, coordinator: Coordinator, small: str
) -> None:
    """A body beyond http.max_body_mib is refused before it uses memory."""
    gateway = await stack.gateway(coordinator, small)
    with pytest.raises(APIStatusError, match="too large") as caught:
        await ask(stack.openai(gateway, stack.token("big:0:0")), [user("x" * 20_000)])
    assert caught.value.status_code == 413


async def test_evicted_sessions_are_rebuilt_from_the_pool(
    stack: GatewayStack, coordinator: Coordinator, small: str
) -> None:
    """With memory for one session, two alternating sessions stay exact."""
    gateway = await stack.gateway(coordinator, small)
    tokens = [stack.token(f"evicted:{number}:0") for number in range(2)]
    histories: list[list[Any]] = [[], []]
    for round_ in range(3):
        for number, token in enumerate(tokens):
            histories[number].append(user(f"SAY[[{number} in round {round_}]]"))
            said = await ask(stack.openai(gateway, token, max_retries=8), histories[number])
            assert said == f"{number} in round {round_}"
    for number, token in enumerate(tokens):
        async with stack.agent(gateway, token) as agent:
            await agent.close(min_turns=3)
        trajectory = await recorded(stack, coordinator, f"evicted:{number}:0")
        check_exact(stack, trajectory)
        assert [turn.parent_turn for turn in trajectory.turns] == [-1, 0, 1]


async def test_unknown_pool_shard_is_unavailable(
    stack: GatewayStack, coordinator: Coordinator
) -> None:
    """A session whose shard is not served is refused after `pool_wait_s`, with the shard's name,
    not after the deadline of a call."""
    stack.start_gateway("gateway-hasty", "--pool-wait-s", "0.5")
    gateway = await stack.gateway(coordinator, "gateway-hasty")
    token = stack.token("lost:0:0", pool_shard=f"not-{SHARD}")
    with pytest.raises(APIStatusError) as caught:
        await ask(stack.openai(gateway, token), [user("hi")])
    assert caught.value.status_code == 503
    assert f"no instance serves pool shard 'not-{SHARD}'" in caught.value.message
    assert "after 0.5 s" in caught.value.message
