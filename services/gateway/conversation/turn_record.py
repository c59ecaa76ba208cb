"""Records in a turn what its request asked for: sampling, labels, and signs of a side call."""

from __future__ import annotations

import hashlib

from forge.v1 import common_pb2
from services.gateway.conversation.prompt import Place, Prompt
from services.gateway.conversation.turn_request import (
    TurnRequest,
    reshaping_values,
    sampling_values,
)

DIGEST_BYTES = 8
"""Bytes of the digest of a system prompt: equal prompts of one trajectory have equal digests."""


def record_request(turn: common_pb2.Turn, request: TurnRequest, prompt: Prompt) -> None:
    """Sets the fields of a turn that depend on its request alone."""
    turn.context_action = request.context_action
    turn.agent = request.labels.agent
    turn.traceparent = request.traceparent
    if request.labels.train is not None:
        turn.train = request.labels.train
    place = prompt.draft.place
    if place is not None:
        turn.offers_tools = bool(request.tools)
        turn.system_digest = _system_digest(place)
    record_sampling(turn, request)


def record_sampling(turn: common_pb2.Turn, request: TurnRequest) -> None:
    """Sets the sampling parameters of a turn, as used and as asked for."""
    used = sampling_values(request.sampling)
    for name, value in used.items():
        setattr(turn, name, value)
    for name, value in sampling_values(request.asked or request.sampling).items():
        if value != used[name]:
            setattr(turn, f"asked_{name}", value)
    for name, value in reshaping_values(request.sampling).items():
        setattr(turn, name, bool(value) if name == "logit_bias" else value)


def _system_digest(place: Place) -> bytes:
    path = [*place.node.ancestors()]
    first = path[-1].message if path else next(iter(place.beyond), None)
    if first is None or first.role != "system":
        return b""
    return hashlib.sha256(first.content.encode()).digest()[:DIGEST_BYTES]
