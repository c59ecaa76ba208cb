"""Protocol-independent result of one turn, complete and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forge.core.conversation.messages import Message
from forge.core.formats import Delta
from forge.v1 import common_pb2
from services.gateway.conversation.prompt import SampledAnswer
from services.gateway.turns.answer_parser import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A finished turn."""

    turn_index: int
    message: Message
    """The answer as it is recorded, with the prefill."""
    prefill: str
    prompt_ids: bytes
    """The int32 ids of the prompt."""
    sampled: SampledAnswer
    prompt_tokens: int
    stop_text: str
    """The stop string that ended the answer; "" if none."""
    tokens: Callable[[], common_pb2.SampledTokens]
    """Returns all sampled tokens, with every requested column."""
    token_logprobs: Callable[[], list[TokenLogprob]]

    @property
    def said(self) -> Message:
        """The answer without the prefill."""
        content = self.message.content
        if not self.prefill:
            return self.message
        return replace(self.message, content=content.removeprefix(self.prefill))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of an answer in one router response."""

    deltas: Sequence[Delta]
    tokens: common_pb2.SampledTokens
    ids: bytes
    """The int32 ids of `tokens` that are a part of the answer."""
    prompt_ids: bytes
    prompt_tokens: int
    last: bool = False
    """True if the turn follows."""
