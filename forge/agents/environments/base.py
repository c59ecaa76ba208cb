"""What an environment is: a task generator, an episode with state and tools, and a score.

Owns the vocabulary that scaffolds and domains share. A scaffold drives any `Episode` without
knowing its domain; a domain knows nothing of models, gateways or scaffolds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, Protocol

Message = dict[str, Any]
"""One OpenAI chat message: role, content, and tool_calls or tool_call_id where they apply."""


RewardKind = Literal["outcome", "process", "speed"]


class ToolError(Exception):
    """A call that cannot be carried out; its text goes back to the model as the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward component, before it becomes a `RewardEvent` of a trajectory."""

    name: str
    kind: RewardKind
    value: float
    turn_index: int = -1
    """The turn credited, counted from 0; -1 credits the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What happened, as the scaffold saw it; everything a score may depend on."""

    answer: str
    """Text of the last assistant message."""
    turns: int
    tool_calls: int = 0
    failed_calls: Sequence[int] = ()
    """Turn index of each call that raised `ToolError`."""
    tool_s: float = 0.0
    """Time in tools that the scaffold itself ran, parallel calls once: 0 for a command agent. Not
    the source of completion times: these come from the gateway's record."""
    messages: Sequence[Message] = field(default_factory=tuple)


class Episode(Protocol):
    """One attempt at one task, with whatever state its tools change."""

    @property
    def messages(self) -> list[Message]:
        """The system and user messages to begin with."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI tool definitions; empty for none."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Carry out one tool call and return its result. Raises `ToolError`."""

    def score(self, transcript: Transcript) -> list[Reward]:
        """Rewards for what happened; exactly one has kind "outcome"."""

    async def close(self) -> None:
        """Free what the episode holds. May be called at any time, more than once."""


class Domain(Protocol):
    """A source of tasks of one kind."""

    name: str
    scaffold: str
    """Scaffold its tasks ask for: "blackbox" or "whitebox"."""
    max_turns: int

    def generate(self, rng: Random) -> dict[str, Any]:
        """A task's payload: JSON values only, a pure function of `rng`."""

    def episode(self, payload: Mapping[str, Any]) -> Episode:
        """A fresh attempt at the task. Raises `InvalidArgument` naming a bad payload key."""
