"""Requests at the limits of types: refused with 400, never an internal error."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway import service
from services.gateway.http import control
from services.gateway.http.anthropic.history import messages_of
from services.gateway.http.anthropic.schema import MessagesRequest
from services.gateway.http.request_fields import request_body
from services.gateway.reward_rules import admitted_rewards


@pytest.mark.parametrize("turn_index", [-(2**63), -2, 2**31, 2**70])
def test_turn_index_beyond_its_type_is_refused(turn_index: int) -> None:
    """The message names the field."""
    body = b'{"rewards": [{"name": "a", "value": 1, "turn_index": %d}]}' % turn_index
    with pytest.raises(InvalidArgument, match="turn_index"):
        control.rewards_of(request_body.decode(body, control.CloseRequest))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"reward": [{"name": "a", "value": 1}]}', "reward"),
        (b'{"rewards": [{"name": "a", "value": 1, "turn": 3}]}', "turn"),
    ],
)
def test_close_with_an_unknown_field_is_refused(body: bytes, field: str) -> None:
    """Ignored, it would seal the trajectory without the reward that its writer meant."""
    with pytest.raises(InvalidArgument, match=f"unknown field `{field}`"):
        request_body.decode(body, control.CloseRequest)


@pytest.mark.parametrize("number", [10**400, -(10**400)], ids=["large", "small"])
def test_number_beyond_any_float_is_refused(number: int) -> None:
    """The message begins with the field and the number."""
    with pytest.raises(InvalidArgument, match=f"max_tokens = {str(number)[:30]}"):
        request_body.sampling_params(max_tokens=number, temperature=None, top_p=None)


@pytest.mark.parametrize("asked", [1e-60, 1e-45, 1e-38, 1e-6])
def test_temperature_that_no_float_division_survives_is_greedy(asked: float) -> None:
    """By HTTP and by gRPC; the turn is recorded as greedy, so it is not trained."""
    sampling = request_body.sampling_params(max_tokens=1, temperature=asked, top_p=None)
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0
    by_grpc = service._sampling(common_pb2.SamplingParams(max_tokens=1, temperature=asked))
    assert by_grpc.temperature == 0


def test_arguments_that_are_not_utf_8_are_refused() -> None:
    """The input of a tool call stays undecoded JSON, and must still be text."""
    call = b'{"type": "tool_use", "id": "x", "name": "look", "input": {"at": "\xff"}}'
    user = b'{"role": "user", "content": "hi"}'
    body = (
        b'{"model": "m", "max_tokens": 1, "messages": [%s, {"role": "assistant", "content": [%s]}]}'
    )
    with pytest.raises(InvalidArgument, match="not valid"):
        list(messages_of(request_body.decode(body % (user, call), MessagesRequest)))


@pytest.mark.parametrize("scope", ["session", "grader"])
def test_reward_of_an_unknown_kind_is_refused(scope: str) -> None:
    """A client of a later release may send a kind that this one does not know."""
    claims = Claims(subject="t:0:0", scopes=frozenset({scope}), agent_rewards=True)
    unknown: Any = 99
    reward = common_pb2.RewardEvent(event_id="e", name="a", kind=unknown)
    with pytest.raises(InvalidArgument, match="kind 99"):
        admitted_rewards(claims, [reward])
