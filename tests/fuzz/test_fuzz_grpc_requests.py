"""Fuzz targets: messages of gRPC. Each passes the checks of its handler, or is refused as
`InvalidArgument` or `PermissionDenied`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import DataLoss, InvalidArgument, PermissionDenied
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, gateway_pb2, inference_pb2, pool_pb2, scheduler_pb2
from services.gateway import reward_rules
from services.gateway import service as gateway
from services.gateway.conversation.chat_history import ChatHistory
from services.inference import codec, kv_codec
from services.inference.engines.base import ModelLimits
from services.pool import validation as pool
from services.pool.streams.append import _Assembly
from services.scheduler import validation as scheduler
from tests.support.gateway.chat_templates import make_model
from tests.support.suite.damaged import damaged, messages

LIMITS = ModelLimits(context_tokens=64, vocabulary=300)
TURNS: Any = SimpleNamespace(model=make_model("chatml"))
TURN = common_pb2.Turn(
    trajectory_id="t:0:0",
    parent_turn=-1,
    prompt_ids=b"\1\0\0\0",
    sampled=common_pb2.SampledTokens(
        ids=b"\2\0\0\0", logprobs=b"\0\0\0\xbf", weight_versions=b"\1\0\0\0"
    ),
    temperature=1.0,
)
session, agent, grader = (
    Claims(subject="t:0:0", scopes=frozenset({scope}), agent_rewards=rewards)
    for scope, rewards in (("session", False), ("session", True), ("grader", False))
)


turns = messages(common_pb2.Turn).map(lambda turn: turn.SerializeToString())


def checked(*checks: Callable[[], Any], refusals: Any = InvalidArgument) -> None:
    """Runs each check of a message, which may be refused."""
    for check in checks:
        try:
            check()
        except refusals as error:
            assert str(error)


@given(damaged(TURN.SerializeToString()) | turns)
def test_pool_turns(serialized: bytes) -> None:
    """A turn of any bytes passes or is refused."""
    checked(lambda: pool.new_turn(serialized))


@given(st.lists(messages(pool_pb2.AppendTurnsRequest), max_size=4))
def test_pool_append_stream(requests: list[pool_pb2.AppendTurnsRequest]) -> None:
    """Whole turns and chunks in any order pass or are refused."""
    assembly = _Assembly(max_turn_bytes=64)
    checked(lambda: [assembly.add(request) for request in requests])
    checked(assembly.end)


@given(
    messages(pool_pb2.AppendRewardsRequest),
    messages(pool_pb2.SealTrajectoryRequest),
    messages(pool_pb2.PutGroupsRequest),
    messages(pool_pb2.SetGroupStatesRequest),
    messages(pool_pb2.EraseTrajectoriesRequest),
)
def test_pool_requests(
    rewards: pool_pb2.AppendRewardsRequest,
    seal: pool_pb2.SealTrajectoryRequest,
    groups: pool_pb2.PutGroupsRequest,
    states: pool_pb2.SetGroupStatesRequest,
    erase: pool_pb2.EraseTrajectoriesRequest,
) -> None:
    """Writes to the pool pass or are refused."""
    checked(
        lambda: pool.append_rewards(rewards),
        lambda: pool.seal_trajectory(seal, now_unix_s=0.0),
        lambda: pool.put_groups(groups, shard="s0"),
        lambda: pool.set_group_states(states, now_unix_s=0.0),
        lambda: pool.check_erase(erase),
    )


@given(
    messages(scheduler_pb2.SubmitTasksRequest),
    messages(scheduler_pb2.LeaseRolloutsRequest),
    messages(scheduler_pb2.FinishRolloutsRequest),
    messages(scheduler_pb2.DropGroupsRequest),
    messages(scheduler_pb2.CommitBatchRequest),
    messages(scheduler_pb2.SetActivityRequest),
)
def test_scheduler_requests(
    submit: scheduler_pb2.SubmitTasksRequest,
    lease: scheduler_pb2.LeaseRolloutsRequest,
    finish: scheduler_pb2.FinishRolloutsRequest,
    drop: scheduler_pb2.DropGroupsRequest,
    commit: scheduler_pb2.CommitBatchRequest,
    activity: scheduler_pb2.SetActivityRequest,
) -> None:
    """Calls of the scheduler pass or are refused."""
    checked(
        lambda: scheduler.check_tasks(submit.tasks, max_group_size=8),
        lambda: scheduler.check_id("runner_id", lease.runner_id),
        lambda: scheduler.check_count("max_rollouts", lease.max_rollouts, most=9),
        lambda: scheduler.check_abilities(lease),
        lambda: scheduler.check_wait_s(lease.wait_s, max_wait_s=1.0),
        lambda: [scheduler.check_result(one, n) for n, one in enumerate(finish.outcomes)],
        lambda: [scheduler.failure_kind(one.kind) for one in finish.outcomes],
        lambda: scheduler.check_drop(drop),
        lambda: scheduler.check_step(commit.step),
        lambda: scheduler.check_activity(activity.activity),
    )


@given(messages(gateway_pb2.ChatRequest), messages(gateway_pb2.GenerateRequest))
def test_gateway_turns(
    chat: gateway_pb2.ChatRequest, generate: gateway_pb2.GenerateRequest
) -> None:
    """Requests for turns pass or are refused."""
    checked(
        lambda: list(ChatHistory(chat.messages)),
        lambda: gateway._tools(chat.tools_json),
        lambda: gateway._sampling(chat.sampling),
        lambda: gateway._sampling(generate.sampling),
        lambda: gateway._prompt_ids(generate.prompt_ids, TURNS.model.vocabulary_tokens),
    )


@given(messages(gateway_pb2.CloseSessionRequest), st.sampled_from((session, agent, grader)))
def test_gateway_rewards(close: gateway_pb2.CloseSessionRequest, claims: Claims) -> None:
    """Rewards of any token are admitted or refused."""
    checked(
        lambda: reward_rules.admitted_rewards(claims, close.rewards),
        lambda: reward_rules.check_agent_end(claims, close.after_agent_s),
        lambda: reward_rules.admitted_reason(claims, close.abandon_reason),
        refusals=(InvalidArgument, PermissionDenied),
    )


@given(
    messages(inference_pb2.SampleRequest),
    messages(inference_pb2.DecodeRequest),
    messages(common_pb2.SampledTokens),
)
def test_inference_requests(
    sample: inference_pb2.SampleRequest,
    decode: inference_pb2.DecodeRequest,
    tokens: common_pb2.SampledTokens,
) -> None:
    """Prompts, sampling parameters and token columns pass or are refused."""
    checked(
        lambda: codec.read_prompt(sample, LIMITS, seed=1),
        lambda: codec.read_prompt(decode, LIMITS, seed=1),
        lambda: codec.read_tokens(tokens),
    )


@given(st.lists(messages(inference_pb2.FetchKvResponse), max_size=4))
def test_inference_keys_and_values(responses: list[inference_pb2.FetchKvResponse]) -> None:
    """Keys and values in any order are joined, or refused with an error of ours."""
    assembler = kv_codec.SpanAssembler()
    for response in responses:
        # Memory of an announced size is taken at once.
        response.slice.whole_bytes = min(response.slice.whole_bytes, 64)
    checked(lambda: [assembler.add(one) for one in responses], refusals=(InvalidArgument, DataLoss))
