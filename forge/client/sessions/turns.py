"""Requests of an agent to the gateway and its answers, as values and as protos.

Owns their encoding and decoding, one piece at a time, for every session client. Opens no channel
and keeps no history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from forge.client.sessions.messages import Message, from_proto, to_proto
from forge.core.enum_words import enum_word
from forge.core.token_columns import float32_array, int32_array, int32_bytes
from forge.v1 import common_pb2, gateway_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """The session that a token opens."""

    trajectory_id: str
    task_id: str
    domain: str
    model: str
    context_tokens: int
    """Longest context of the model, prompt and answer together."""
    turns: int
    """Ended turns of this session."""
    model_s: float = 0.0
    """Time with model calls in flight at this gateway; overlapping calls count once."""
    unanswered: str = ""
    """Reason why the last ended model call got no answer, if the agent did not cause it."""

    @classmethod
    def decode(cls, response: gateway_pb2.OpenSessionResponse) -> SessionInfo:
        """Decodes a response."""
        return cls(**{field.name: getattr(response, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn, parsed."""

    message: dict[str, Any]
    """The assistant message, OpenAI-shaped: append it to the history as it is."""
    finish_reason: str
    """`stop`, `length` or `aborted`; one of a newer gateway by its number, such as `unknown_9`."""
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    turn_index: int

    @property
    def text(self) -> str:
        """Content of the message."""
        content: str = self.message["content"]
        return content

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Tool calls of the message, OpenAI-shaped."""
        calls: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One turn in tokens; the three columns have one entry per token."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: str
    """As of an `Answer`."""
    turn_index: int


class ChatOptions(TypedDict, total=False):
    """Options of one turn over messages."""

    tools: Sequence[Mapping[str, Any]]
    """OpenAI tool definitions; none by default."""
    max_tokens: int
    """Most tokens to sample; 1024 by default."""
    temperature: float | None
    """None, the default: the gateway's, which is 1, the trained distribution."""
    stop: Sequence[str]
    """Strings that end the turn when sampled."""
    context_action: str
    """Names the context management this call performs, e.g. "fold"; "" for none."""
    model: str
    """Name of a model beside the policy (docs/models.md); "", the default: the policy."""


class GenerateOptions(TypedDict, total=False):
    """Options of one turn over token ids; as in `ChatOptions`."""

    max_tokens: int
    temperature: float | None
    stop_token_ids: Sequence[int]
    context_action: str
    model: str


class CloseOptions(TypedDict, total=False):
    """Options of the close of a session."""

    abandon_reason: str
    """Abandons the trajectory instead of sealing it."""
    min_turns: int
    """The close fails with fewer turns on record."""
    after_agent_s: float
    """Seconds since the end of the agent, for example spent on scoring; its completion time
    excludes them."""


def why_abandoned(error: BaseException | None) -> str:
    """Return the recorded reason when `error` ends a session's block; "" for a normal end."""
    return f"{type(error).__name__}: {error}" if error else ""


def chat_request(
    messages: Sequence[Message],
    *,
    stream: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    max_tokens: int = 1024,
    temperature: float | None = None,
    stop: Sequence[str] = (),
    context_action: str = "",
    model: str = "",
) -> gateway_pb2.ChatRequest:
    """Encode a request over messages. Raises `InvalidArgument` for an invalid message."""
    return gateway_pb2.ChatRequest(
        messages=[to_proto(message) for message in messages],
        tools_json=json.dumps(list(tools)) if tools else "",
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature),
        stop=stop,
        context_action=context_action,
        stream=stream,
        model=model,
    )


def chat_pieces(response: gateway_pb2.ChatResponse) -> Iterator[str | Answer]:
    """Yields the new text of a response, and the answer if it is the last."""
    if response.delta:
        yield response.delta
    if response.HasField("message"):
        yield Answer(
            message=from_proto(response.message),
            finish_reason=enum_word(common_pb2.FinishReason, response.finish_reason),
            prompt_tokens=response.prompt_tokens,
            sampled_tokens=response.sampled_tokens,
            cached_tokens=response.cached_tokens,
            turn_index=response.turn_index,
        )


def generate_request(
    prompt_ids: Sequence[int],
    *,
    max_tokens: int = 1024,
    temperature: float | None = None,
    stop_token_ids: Sequence[int] = (),
    context_action: str = "",
    model: str = "",
) -> gateway_pb2.GenerateRequest:
    """Encodes a request over token ids."""
    return gateway_pb2.GenerateRequest(
        prompt_ids=int32_bytes(prompt_ids),
        sampling=common_pb2.SamplingParams(
            max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids
        ),
        context_action=context_action,
        model=model,
    )


class SampledColumns:
    """The columns of one turn while its responses arrive."""

    def __init__(self) -> None:
        self._ids, self._logprobs, self._versions = bytearray(), bytearray(), bytearray()

    def add(self, response: gateway_pb2.GenerateResponse) -> Sampled | None:
        """Add one response; return the turn after the last one, else None."""
        self._ids += response.tokens.ids
        self._logprobs += response.tokens.logprobs
        self._versions += response.tokens.weight_versions
        if not response.finish_reason:
            return None
        return Sampled(
            ids=int32_array(bytes(self._ids)),
            logprobs=float32_array(bytes(self._logprobs)),
            weight_versions=int32_array(bytes(self._versions)),
            finish_reason=enum_word(common_pb2.FinishReason, response.finish_reason),
            turn_index=response.turn_index,
        )
