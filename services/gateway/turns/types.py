"""What is asked of a turn, and what comes of it, whatever protocol it came by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge.core.conversation.messages import Message
from forge.core.formats import Delta
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import Sampled
from services.gateway.conversation.handles import Handle
from services.gateway.model.chat_model import Tools
from services.gateway.turns.answer_parser import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One call of an agent, whatever protocol it came by."""

    messages: Sequence[Message] = ()
    prompt_ids: bytes = b""
    """Set instead of `messages` by agents that render for themselves."""
    tools: Tools = ()
    call_tools: bool = True
    """Whether the answer is read for tool calls; else they are text."""
    parallel_calls: bool = True
    """Whether an answer may have several tool calls; else it ends with the first."""
    required_tool: str | None = None
    """The tool the answer must call; "" for any; None leaves it to the model."""
    sampling: common_pb2.SamplingParams
    """A `grammar` is the form of the answer, wherever the model reasons or calls tools instead."""
    stop: Sequence[str] = ()
    context_action: str = ""
    handle: Handle | None = None
    """A name for the turn, if it ends well."""
    stream: bool = False
    """Whether the caller passes deltas on as they come: then there is no second attempt."""
    arrived_s: float
    """Monotonic."""
    arrived_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A finished turn."""

    turn_index: int
    message: Message
    sampled: Sampled
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
