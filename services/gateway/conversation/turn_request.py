"""One call of an agent, independent of its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.core.conversation.messages import Message
from forge.v1 import common_pb2
from services.gateway.conversation.handles import Handle
from services.gateway.model.chat_model import Tools


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
