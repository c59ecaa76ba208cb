"""Protocol-independent result of one turn, complete and in pieces."""

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
    """The stop string that ended the answer; "" if none."""
    tokens: Callable[[], common_pb2.SampledTokens]
    """Returns all sampled tokens, with every requested column."""
    token_logprobs: Callable[[], list[TokenLogprob]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of an answer in one router response."""

    deltas: Sequence[Delta]
    tokens: common_pb2.SampledTokens
    prompt_tokens: int
    last: bool = False
    """True if the turn follows."""
