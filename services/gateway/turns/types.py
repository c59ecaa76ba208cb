"""The result of one turn, whole and in pieces, independent of its protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge.core.conversation.messages import Message
from forge.core.formats import Delta
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import SampledAnswer
from services.gateway.turns.answer_parser import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A finished turn."""

    turn_index: int
    message: Message
    sampled: SampledAnswer
    prompt_tokens: int
    stop_text: str
    """The stop string that ended it; "" if none did."""
    tokens: Callable[[], common_pb2.SampledTokens]
    """All that was sampled, in every column that was asked for."""
    token_logprobs: Callable[[], list[TokenLogprob]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one response of the router added."""

    deltas: Sequence[Delta]
    tokens: common_pb2.SampledTokens
    prompt_tokens: int
    last: bool = False
    """Whether the turn comes next."""
