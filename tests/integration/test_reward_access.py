"""Writers of rewards: every RPC and route that writes one, with every token, on real processes."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc
import pytest

from forge.client.reward_events import reward_event
from forge.client.sessions.session import AgentSession
from forge.core.credit.rewards import RewardKind
from forge.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    LimitReached,
    PermissionDenied,
    Unauthenticated,
)
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from services.pool.config import PoolConfig
from tests.support.gateway.stack import GatewayStack, recorded

AGENT_PREFIX = "agent:"
ERRORS = {
    200: None,
    400: InvalidArgument,
    401: Unauthenticated,
    403: PermissionDenied,
    409: AlreadyExists,
}


def own(gateway: Instance, token: str) -> AgentSession:
    """A client that has one token only."""
    return AgentSession.connect(gateway.address, token, owns_rollout=False)


async def annotate(gateway: Instance, token: str, event: common_pb2.RewardEvent) -> None:
    async with own(gateway, token) as session:
        await session.annotate(event)


async def close(gateway: Instance, token: str, event: common_pb2.RewardEvent) -> None:
    async with own(gateway, token) as session:
        await session.close(event)


async def post(
    gateway: Instance, token: str, body: dict[str, Any], *, in_path: bool = False
) -> tuple[int, str]:
    """Status and message of `POST /v1/forge/close`."""
    prefix = f"/s/{token}" if in_path else ""
    url = f"http://{gateway.metadata['http']}{prefix}/v1/forge/close"
    headers = {} if in_path else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as got:
        answer = await got.json()
        return got.status, "" if got.status == 200 else answer["error"]["message"]


async def post_event(
    gateway: Instance, token: str, event: common_pb2.RewardEvent, *, in_path: bool = False
) -> None:
    kind = common_pb2.RewardKind.Name(event.kind).removeprefix("REWARD_KIND_").lower()
    reward = {"event_id": event.event_id, "name": event.name, "value": event.value, "kind": kind}
    status, message = await post(gateway, token, {"rewards": [reward]}, in_path=in_path)
    if error := ERRORS[status]:
        raise error(message)


async def post_event_in_path(gateway: Instance, token: str, event: common_pb2.RewardEvent) -> None:
    await post_event(gateway, token, event, in_path=True)


Write = Callable[[Instance, str, common_pb2.RewardEvent], Awaitable[None]]
WRITES: dict[str, Write] = {
    "Annotate": annotate,
    "CloseSession": close,
    "POST close": post_event,
    "POST close in path": post_event_in_path,
}
writes = pytest.mark.parametrize("write", list(WRITES.values()), ids=list(WRITES))


def named(write: Write) -> str:
    return write.__name__.replace("_", "-")


async def rewards_of(
    stack: GatewayStack, coordinator: Coordinator, trajectory_id: str
) -> dict[str, tuple[int, float]]:
    """By event id: kind and value."""
    client = await stack.pool_client(coordinator)
    request = pool_pb2.GetSummariesRequest(trajectory_ids=[trajectory_id])
    response = await client.stub.GetSummaries(request, timeout=30)
    await client.close()
    events = [event for summary in response.summaries for event in summary.rewards]
    return {event.event_id: (event.kind, event.value) for event in events}


@writes
async def test_agent_sets_no_reward(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, write: Write
) -> None:
    """An outcome of 1000 by the session token is refused; the grader's outcome alone is stored."""
    trajectory_id = f"greedy-{named(write)}:0:0"
    token = stack.token(trajectory_id)
    for kind in ("outcome", "process", "speed"):
        with pytest.raises(PermissionDenied, match="agent_rewards"):
            await write(gateway, token, reward_event("great", 1000.0, kind=kind))
    grader = stack.grader_token(trajectory_id)
    await write(gateway, grader, reward_event("solved", 0.0))
    stored = await rewards_of(stack, own_coordinator, trajectory_id)
    assert stored == {"outcome-solved--1": (common_pb2.REWARD_KIND_OUTCOME, 0.0)}


@writes
@pytest.mark.parametrize("kind", ["process", "agent"])
async def test_agent_with_agent_rewards_stores_its_own_components(
    stack: GatewayStack,
    gateway: Instance,
    own_coordinator: Coordinator,
    write: Write,
    kind: RewardKind,
) -> None:
    """With their own kind and ids; they hide none of the grader's."""
    trajectory_id = f"modest-{kind}-{named(write)}:0:0"
    token = stack.token(trajectory_id, agent_rewards=True)
    report = reward_event("sure", -0.5, kind=kind)
    report.event_id = "outcome-solved--1"  # The id that the grader will use.
    await write(gateway, token, report)
    async with own(gateway, stack.grader_token(trajectory_id)) as grader:
        await grader.close(reward_event("solved", 1.0))
    assert await rewards_of(stack, own_coordinator, trajectory_id) == {
        f"{AGENT_PREFIX}outcome-solved--1": (common_pb2.REWARD_KIND_AGENT, -0.5),
        "outcome-solved--1": (common_pb2.REWARD_KIND_OUTCOME, 1.0),
    }


@writes
@pytest.mark.parametrize(
    ("kind", "value", "error", "says"),
    [
        ("outcome", 0.5, PermissionDenied, "outcome"),
        ("speed", 0.5, PermissionDenied, "speed"),
        ("agent", 1.5, InvalidArgument, r"sure.*1\.5"),
        ("process", -1000.0, InvalidArgument, r"sure.*-1000"),
    ],
)
async def test_agent_rewards_are_bounded(
    stack: GatewayStack,
    gateway: Instance,
    own_coordinator: Coordinator,
    write: Write,
    kind: RewardKind,
    value: float,
    error: type[Exception],
    says: str,
) -> None:
    """Never an outcome or a speed, and from -1 to 1; a refused one is named and not stored."""
    trajectory_id = f"bound-{kind}-{named(write)}:0:0"
    token = stack.token(trajectory_id, agent_rewards=True)
    with pytest.raises(error, match=says):
        await write(gateway, token, reward_event("sure", value, kind=kind))
    assert await rewards_of(stack, own_coordinator, trajectory_id) == {}


@writes
async def test_second_outcome_is_refused_and_the_first_is_repeatable(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, write: Write
) -> None:
    """One outcome per trajectory, on every route; the same event id again changes nothing."""
    trajectory_id = f"twice-{named(write)}:0:0"
    grader = stack.grader_token(trajectory_id)
    await annotate(gateway, grader, reward_event("solved", 0.25))
    with pytest.raises(AlreadyExists, match="outcome-solved--1"):
        await write(gateway, grader, reward_event("bonus", 1000.0))
    await write(gateway, grader, reward_event("solved", 0.75))
    stored = await rewards_of(stack, own_coordinator, trajectory_id)
    assert stored == {"outcome-solved--1": (common_pb2.REWARD_KIND_OUTCOME, 0.25)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e7, -1e7])
async def test_excessive_rewards_are_refused_by_name_and_value(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, value: float
) -> None:
    """The grader's, too; the trajectory stays open."""
    trajectory_id = "absurd:0:0"
    async with own(gateway, stack.grader_token(trajectory_id)) as grader:
        for call in (grader.annotate, grader.close):
            with pytest.raises(InvalidArgument, match=re.escape(f"'solved' has value {value};")):
                await call(reward_event("solved", value))
        assert (await grader.open()).turns == 0
    assert await rewards_of(stack, own_coordinator, trajectory_id) == {}


@writes
@pytest.mark.parametrize("scope", ["service", "operator", "runner"])
async def test_tokens_without_a_trajectory_write_no_reward(
    stack: GatewayStack, gateway: Instance, write: Write, scope: str
) -> None:
    """Service, operator and runner tokens name no trajectory."""
    token = stack.token("any:0:0", scopes=frozenset({scope}))
    with pytest.raises(PermissionDenied):
        await write(gateway, token, reward_event("solved", 1.0))


@writes
@pytest.mark.parametrize("scope", ["session", "grader"])
async def test_tokens_of_another_trajectory_write_to_their_own(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, write: Write, scope: str
) -> None:
    """A token names its trajectory, so no call changes another one."""
    victim, other = f"victim-{scope}-{named(write)}:0:0", f"other-{scope}-{named(write)}:0:0"
    await annotate(gateway, stack.grader_token(victim), reward_event("solved", 0.0))
    token = stack.token(other, scopes=frozenset({scope}), agent_rewards=True)
    kind: RewardKind = "outcome" if scope == "grader" else "agent"
    await write(gateway, token, reward_event("mine", 1.0, kind=kind))
    stored = await rewards_of(stack, own_coordinator, victim)
    assert list(stored) == ["outcome-solved--1"]
    assert len(await rewards_of(stack, own_coordinator, other)) == 1


@writes
async def test_expired_grader_token_is_refused(
    stack: GatewayStack, gateway: Instance, write: Write
) -> None:
    """As any other token."""
    token = stack.grader_token("late:0:0", expires_unix_s=1.0)
    with pytest.raises(Unauthenticated, match="expired"):
        await write(gateway, token, reward_event("solved", 1.0))


async def test_grader_token_samples_nothing(stack: GatewayStack, gateway: Instance) -> None:
    """The record has only the agent's turns."""
    token = stack.grader_token("grader-samples:0:0")
    message: Any = {"role": "user", "content": "SAY[[hi]]"}
    async with own(gateway, token) as grader:
        with pytest.raises(PermissionDenied):
            await grader.chat([message])
        with pytest.raises(PermissionDenied):
            await grader.generate([1, 2])
    url = f"http://{gateway.metadata['http']}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {token}"}
    body = {"model": "policy", "messages": [message]}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as got:
        assert got.status == 403


@pytest.mark.parametrize("scope", ["session", "grader", "runner", "operator"])
@pytest.mark.parametrize("method", ["AppendRewards", "SealTrajectory"])
async def test_pool_takes_rewards_from_services_only(
    stack: GatewayStack, own_coordinator: Coordinator, method: str, scope: str
) -> None:
    """The pool's own writes are closed to tokens of a trajectory."""
    client = await stack.pool_client(own_coordinator)
    metadata = (("authorization", f"Bearer {stack.token('p:0:0', scopes=frozenset({scope}))}"),)
    request: Any = {
        "AppendRewards": pool_pb2.AppendRewardsRequest(trajectory_id="p:0:0"),
        "SealTrajectory": pool_pb2.SealTrajectoryRequest(trajectory_id="p:0:0"),
    }[method]
    async with grpc.aio.insecure_channel(client.address) as channel:
        call = getattr(pool_pb2_grpc.PoolServiceStub(channel), method)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(request, metadata=metadata, timeout=30)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await client.close()


async def test_abandon_of_an_agent_is_marked_as_its_own(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Its reason is marked, so it does not count as an infrastructure failure."""
    async with own(gateway, stack.token("quit:0:0")) as agent:
        await agent.close(abandon_reason="infrastructure: not my fault")
        # Again: nothing changes.
        await agent.close(abandon_reason="infrastructure: not my fault")
    trajectory = await recorded(stack, own_coordinator, "quit:0:0")
    assert trajectory.reason == "agent: infrastructure: not my fault"
    async with own(gateway, stack.grader_token("lost:0:0")) as grader:
        await grader.close(abandon_reason="infrastructure: a pool is gone")
    trajectory = await recorded(stack, own_coordinator, "lost:0:0")
    assert trajectory.reason == "infrastructure: a pool is gone"


async def test_agent_cannot_date_its_end_back(stack: GatewayStack, gateway: Instance) -> None:
    """`after_agent_s` shortens the completion time, which is a reward: only the grader may set
    it."""
    async with own(gateway, stack.token("back-dated:0:0")) as agent:
        with pytest.raises(PermissionDenied, match="after_agent_s"):
            await agent.close(after_agent_s=60.0)
    status, says = await post(gateway, stack.token("back-dated:1:0"), {"after_agent_s": 60.0})
    assert (status, "after_agent_s" in says) == (403, True)
    async with own(gateway, stack.grader_token("back-dated:0:0")) as grader:
        assert await grader.close(after_agent_s=60.0) == 0


async def test_trajectory_sealed_by_the_agent_is_graded_later(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A close by the agent does not exclude the grader, and an abandon stays one."""
    async with own(gateway, stack.token("eager:0:0")) as agent:
        await agent.close()
    async with own(gateway, stack.grader_token("eager:0:0")) as grader:
        await grader.close(reward_event("solved", 1.0))
    assert list(await rewards_of(stack, own_coordinator, "eager:0:0")) == ["outcome-solved--1"]
    async with own(gateway, stack.token("eager:1:0")) as agent:
        await agent.close(abandon_reason="bored")
    async with own(gateway, stack.grader_token("eager:1:0")) as grader:
        with pytest.raises(FailedPrecondition, match="abandoned"):
            await grader.close(reward_event("solved", 1.0))


async def test_failed_grading_does_not_undo_the_seal_of_an_agent(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """The runner's abandon leaves the trajectory sealed without an outcome, which counts as 0: an
    agent that closes early gains nothing."""
    async with own(gateway, stack.token("hasty:0:0")) as agent:
        await agent.close()
    async with own(gateway, stack.grader_token("hasty:0:0")) as grader:
        with pytest.raises(FailedPrecondition, match="is sealed"):
            await grader.close(abandon_reason="the reward function failed")
    client = await stack.pool_client(own_coordinator)
    request = pool_pb2.GetSummariesRequest(trajectory_ids=["hasty:0:0"])
    (summary,) = (await client.stub.GetSummaries(request, timeout=30)).summaries
    await client.close()
    assert summary.state == common_pb2.TRAJECTORY_STATE_SEALED
    assert not summary.rewards


async def test_number_of_agent_rewards_is_bounded(stack: GatewayStack, gateway: Instance) -> None:
    """By the pool, at every way to write them; a stored event may be repeated, and the grader's
    rewards do not count. No retry helps, so neither the gateway nor the client retries."""
    most = PoolConfig().max_agent_rewards
    events = [reward_event(f"step-{number}", 0.5, kind="agent") for number in range(most + 1)]
    token = stack.token("talkative:0:0", agent_rewards=True)
    async with own(gateway, token) as agent:
        for first in range(0, most, 256):
            await agent.annotate(*events[first : first + 256])
        await agent.annotate(events[0])
    refused = pytest.raises(LimitReached, match=f"max_agent_rewards = {most}")
    async with own(gateway, token) as agent:
        with refused:
            await agent.annotate(events[-1])
        with refused:
            await agent.close(events[-1])
    reward = {"event_id": "one-more", "name": "step", "value": 0.5, "kind": "agent"}
    assert (await post(gateway, token, {"rewards": [reward]}))[0] == 429
    async with own(gateway, stack.grader_token("talkative:0:0")) as grader:
        await grader.close(reward_event("solved", 1.0))


async def test_client_with_both_tokens_samples_and_grades(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A harness that grades by itself: one client, each call with its token."""
    tokens = {
        "token": stack.token("harness:0:0"),
        "grader_token": stack.grader_token("harness:0:0"),
    }
    async with AgentSession.connect(gateway.address, **tokens) as session:
        await session.chat([{"role": "user", "content": "SAY[[4]]"}])
        await session.annotate(reward_event("tidy", 0.5, kind="process", turn_index=0))
        assert await session.close(reward_event("solved", 1.0), min_turns=1) == 1
    stored = await rewards_of(stack, own_coordinator, "harness:0:0")
    assert {value for _, value in stored.values()} == {0.5, 1.0}
