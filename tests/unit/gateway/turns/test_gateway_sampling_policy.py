"""Sampling parameters of agents under the policies of their sessions."""

from __future__ import annotations

from typing import Any

import pytest

from forge.v1.common_pb2 import SamplingParams
from services.gateway.config import SamplingBounds
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.turn_request import (
    TurnRequest,
    reshaping_values,
    sampling_values,
)
from services.gateway.turns.sampling_policy import SAMPLING_HEADER, with_policy

GREEDY: Any = {"temperature": 0.0, "top_p": 0.5, "top_k": 5, "seed": 42}


def policed(policy: str, **asked: Any) -> TurnRequest:
    request = TurnRequest(sampling=SamplingParams(**asked), arrived=Moment.now())
    return with_policy(request, policy, SamplingBounds())


def test_override_samples_from_the_trained_distribution() -> None:
    """Temperature 1 without cuts and without the agent's seed; other parameters stay."""
    request = policed("override", max_tokens=9, stop_token_ids=[3], **GREEDY)
    assert request.sampling == SamplingParams(max_tokens=9, stop_token_ids=[3])
    assert request.headers[SAMPLING_HEADER] == (
        "temperature=1 (asked 0), top_p=1 (asked 0.5), top_k=0 (asked 5), seed=random (asked 42)"
    )
    assert request.asked is not None
    assert sampling_values(request.asked) == {"temperature": 0, "top_p": 0.5, "top_k": 5}


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        (GREEDY, (0.5, pytest.approx(0.9), 20)),
        ({"temperature": 2.0, "top_k": 50}, (1.5, 1.0, 50)),
        ({"temperature": 0.75, "top_p": 0.95}, (0.75, pytest.approx(0.95), 0)),
    ],
)
def test_bound_keeps_what_can_be_trained(asked: Any, used: tuple[float, float, int]) -> None:
    """Parameters within the bounds stay, others move to the nearest bound."""
    request = policed("bound", **asked)
    assert tuple(sampling_values(request.sampling).values()) == used
    assert not request.sampling.HasField("seed")


@pytest.mark.parametrize("policy", ["bound", "override"])
def test_policies_drop_penalties(policy: str) -> None:
    """With min_p and logit_bias; the header names them, but not neutral values."""
    request = policed(
        policy, min_p=0.25, presence_penalty=1.5, repetition_penalty=1.0, logit_bias={3: 1.0}
    )
    assert sampling_values(request.sampling) == sampling_values(SamplingParams())
    assert reshaping_values(request.sampling) == {}
    assert request.headers[SAMPLING_HEADER] == (
        "min_p=none (asked 0.25), presence_penalty=none (asked 1.5), "
        "logit_bias=none (asked 1 tokens)"
    )


@pytest.mark.parametrize("policy", ["", "agent"])
def test_agent_parameters_hold_without_a_policy(policy: str) -> None:
    """Also in tokens of an earlier release: nothing is changed or named."""
    request = policed(policy, **GREEDY)
    assert request.sampling == SamplingParams(**GREEDY)
    assert (request.headers, request.asked) == ({}, None)


@pytest.mark.parametrize("policy", ["bound", "override"])
def test_default_parameters_are_no_change(policy: str) -> None:
    """The agent gets no header."""
    request = policed(policy, max_tokens=5, temperature=1.0, top_p=1.0)
    assert sampling_values(request.sampling) == {"temperature": 1, "top_p": 1, "top_k": 0}
    assert (request.headers, request.asked) == ({}, None)
