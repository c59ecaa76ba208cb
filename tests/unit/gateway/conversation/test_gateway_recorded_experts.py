"""Experts of an answer are recorded with its turn, and only there."""

from __future__ import annotations

import pytest

from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2, inference_pb2
from services.gateway.conversation import recorded_experts
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.recorded_experts import record_experts
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.turns.answer_parser import turn_parser
from tests.support.gateway.chat_templates import make_model


def routed(first: int, rows: range) -> common_pb2.RoutedExperts:
    return common_pb2.RoutedExperts(
        ids=bytes(rows), layers=1, top_k=1, id_bytes=1, first_token=first
    )


@pytest.mark.parametrize(
    ("most_bytes", "first", "rows"), [(100, 7, range(7, 12)), (3, 9, range(9, 12))]
)
def test_turn_keeps_the_experts_that_earlier_turns_lack(
    most_bytes: int, first: int, rows: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last shared token on, up to the end of the sequence, at most so many bytes."""
    monkeypatch.setattr(recorded_experts, "MAX_TURN_BYTES", most_bytes)
    turn = common_pb2.Turn(prefix_tokens=8)
    record_experts(turn, routed(2, range(2, 20)), length=12)
    assert turn.sampled.routed_experts == routed(first, rows)


def test_answer_collects_the_experts_of_its_responses() -> None:
    """Also from responses without tokens; a resampled answer drops earlier records."""
    request = TurnRequest(
        prompt_ids=int32_bytes([1, 2]),
        sampling=common_pb2.SamplingParams(max_tokens=9),
        arrived=Moment.now(),
    )
    parser = turn_parser(make_model("chatml"), request, opening="", inside=False)

    def add(experts: common_pb2.RoutedExperts, *ids: int) -> None:
        tokens = common_pb2.SampledTokens(
            ids=int32_bytes(ids),
            logprobs=float32_bytes([-1.0] * len(ids)),
            weight_versions=int32_bytes([1] * len(ids)),
            routed_experts=experts,
        )
        parser.add_response(inference_pb2.SampleResponse(tokens=tokens))

    add(routed(0, range(5)), 5)
    parser.restart()
    add(routed(0, range(1)))
    add(routed(1, range(1, 2)), 5)
    add(routed(2, range(2, 4)), 5, 5)
    sampled = parser.sampled_answer(parsed=False)
    assert sampled is not None
    assert sampled.routed_experts == routed(0, range(4))
    assert not sampled.columns.HasField("routed_experts")
