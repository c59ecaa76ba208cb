"""The object that OpenAI's two completion APIs return, whole or in chunks.

Owns what both have around their choices: id, usage, fingerprint, the end and the errors of a
stream. Not here: the choices (`chat`, `completions`).
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from forge.core.errors import ForgeError
from forge.core.token_columns import int32_array
from forge.v1 import common_pb2
from services.gateway.http.edge import sse
from services.gateway.http.errors import Failure, openai_error
from services.gateway.sessions import Session
from services.gateway.turns.run import Turns
from services.gateway.turns.types import Turn

_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, kw_only=True)
class CompletionObject(ABC):
    """The answer to one request, of one or more choices."""

    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    """`object` of a complete answer."""
    chunk: ClassVar[str]
    """`object` of a chunk of a stream."""

    turns: Turns
    session: Session
    model: str
    """Name of the model in the request, and in the answer."""
    include_usage: bool
    """A stream ends with the usage."""
    created: int = field(default_factory=lambda: int(time.time()))
    completion_id: str = field(init=False)

    def __post_init__(self) -> None:
        """Draws the id."""
        self.completion_id = f"{self.id_prefix}-{uuid.uuid4().hex}"

    @abstractmethod
    def usage(self, turns: list[Turn]) -> dict[str, Any]:
        """Returns the usage of all choices."""

    def complete_object(self, choices: list[dict[str, Any]], turns: list[Turn]) -> dict[str, Any]:
        """Returns the whole answer."""
        return self._object(self.whole, choices) | {
            "system_fingerprint": fingerprint(turns),
            "usage": self.usage(turns),
        }

    def chunk_object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a chunk with a part of these choices."""
        return self._object(self.chunk, choices)

    def end(self, turns: list[Turn]) -> bytes:
        """Returns the events after those of all choices."""
        if not self.include_usage:
            return _DONE
        return sse(self.chunk_object([]) | {"usage": self.usage(turns)}) + _DONE

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def finish_reason(turn: Turn) -> str:
    """Returns OpenAI's finish reason of a turn."""
    if turn.sampled.finish_reason == common_pb2.FINISH_REASON_LENGTH:
        return "length"
    return "tool_calls" if turn.message.tool_calls else "stop"


def usage_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns the usage of the choices of one prompt, which counts once."""
    prompt_tokens = max((turn.prompt_tokens for turn in turns), default=0)
    sampled_tokens = sum(turn.sampled.tokens for turn in turns)
    cached_tokens = max((turn.sampled.cached_tokens for turn in turns), default=0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def fingerprint(turns: list[Turn]) -> str:
    """Returns the newest weight version among the sampled tokens."""
    versions = [v for turn in turns for v in int32_array(turn.sampled.columns.weight_versions)[-1:]]
    return f"weights-{max(versions)}" if versions else ""


def error_event(error: ForgeError) -> bytes:
    """Returns the event of an error in a stream."""
    return sse(openai_error(Failure.of(error)))
