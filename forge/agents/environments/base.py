"""The interface of environments: task generators, episodes with state and tools, and scores.

Owns the types that scaffolds and domains share. A scaffold runs any `Episode` without knowledge of
its domain; a domain does not know models, gateways or scaffolds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, Protocol

Message = dict[str, Any]
"""One OpenAI chat message: role, content, and possibly tool_calls or tool_call_id."""


RewardKind = Literal["outcome", "process", "speed"]


class ToolError(Exception):
    """A failed tool call; the model gets the message as the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward component, before it becomes a `RewardEvent` of a trajectory."""

    name: str
    kind: RewardKind
    value: float
    turn_index: int = -1
    """The credited turn, counted from 0; -1: the last turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The record of a rollout by its scaffold: the input of a score."""

    answer: str
    """Text of the last assistant message."""
    turns: int
    tool_calls: int = 0
    failed_calls: Sequence[int] = ()
    """Turn index of each call that raised `ToolError`."""
    tool_s: float = 0.0
    """Time in tools of the scaffold, parallel calls counted once; 0 for a command agent. Completion
    times do not use it: they come from the gateway's record."""
    messages: Sequence[Message] = field(default_factory=tuple)


class Episode(Protocol):
    """One attempt at one task, with the state of its tools."""

    @property
    def messages(self) -> list[Message]:
        """The first messages, of system and user."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI tool definitions, possibly none."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Executes one tool call and returns its result. Raises `ToolError`."""

    def score(self, transcript: Transcript) -> list[Reward]:
        """Returns the rewards; exactly one has kind "outcome"."""

    async def close(self) -> None:
        """Frees all resources. May be called at any time, more than once."""


class Domain(Protocol):
    """A kind of task: generates payloads and starts episodes."""

    name: str
    scaffold: str
    """Scaffold of its tasks: "blackbox" or "whitebox"."""
    max_turns: int

    def generate(self, rng: Random) -> dict[str, Any]:
        """Returns a task's payload: JSON values only, a pure function of `rng`."""

    def episode(self, payload: Mapping[str, Any]) -> Episode:
        """Returns a new attempt. Raises `InvalidArgument` with the name of a wrong payload key."""


class PlainEpisode:
    """An attempt with tools that need no await, by default none, and nothing to free."""

    tools: list[dict[str, Any]] = []

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Executes one tool call and returns its result. Raises `ToolError`."""
        raise ToolError(f"unknown tool {name}")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the result of `run`. Raises `ToolError`."""
        return self.run(name, arguments)

    async def close(self) -> None:
        """Nothing to free."""


def asked(instruction: str, question: str) -> list[Message]:
    """Returns the first messages of a task."""
    return [{"role": "system", "content": instruction}, {"role": "user", "content": question}]


def outcome_and_failures(name: str, outcome: float, transcript: Transcript) -> list[Reward]:
    """Returns the outcome; each failed call gets -1 as process."""
    return [
        Reward(name=name, kind="outcome", value=outcome),
        *(
            Reward(name="failed_call", kind="process", value=-1.0, turn_index=turn)
            for turn in transcript.failed_calls
        ),
    ]
