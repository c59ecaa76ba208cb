"""Demonstrations: conversations in which a scripted teacher attempts a task.

Owns their messages: tool calls are executed and answered as in a scaffold, and a fold makes the
messages of `forge.agents.environments.folding`. Each domain owns the teacher's actions and
mistakes. Owns no tokens and no models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from forge.agents.environments.base import Episode, Message, ToolError
from forge.agents.environments.folding import fold_request, folded


class TaughtEpisode(Episode, Protocol):
    """An attempt whose tools a teacher can use."""

    def __init__(self, payload: Mapping[str, Any]) -> None: ...

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Executes one tool call and returns its result. Raises `ToolError`."""


EpisodeT = TypeVar("EpisodeT", bound=TaughtEpisode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """The training data of one attempt."""

    tools: tuple[dict[str, Any], ...]
    contexts: tuple[tuple[Message, ...], ...]
    """Branches of the conversation, each with an answer at its end. All assistant messages are the
    teacher's and are training targets."""


class Rehearsal:
    """Records a teacher's conversation with the messages that a scaffold would send."""

    def __init__(self, episode: TaughtEpisode) -> None:
        self._episode = episode
        self._history = list(episode.messages)
        self._contexts: list[tuple[Message, ...]] = []
        self._calls = 0

    def call(self, name: str, /, **arguments: Any) -> str:
        """Executes one tool call of the teacher; returns its result."""
        call_id = f"call_{self._calls}"
        self._calls += 1
        self._history.append(tool_call_message(call_id, name, arguments))
        try:
            result = self._episode.run(name, arguments)
        except ToolError as error:
            result = str(error)
        self._history.append({"role": "tool", "tool_call_id": call_id, "content": result})
        return result

    def say(self, text: str) -> None:
        """Records an answer of the teacher without a call."""
        self._history.append({"role": "assistant", "content": text})

    def fold(self, fold_prompt: str, summary: str) -> None:
        """Records a fold: the request, and the teacher's summary, which replaces the history."""
        self._history = fold_request(self._history, fold_prompt)
        self.say(summary)
        self._close_context()
        self._history = folded(self._episode.messages, summary)

    def finished(self) -> Demonstration:
        """Ends the rehearsal; returns its demonstration."""
        self._close_context()
        return Demonstration(tools=tuple(self._episode.tools), contexts=tuple(self._contexts))

    def _close_context(self) -> None:
        self._contexts.append(tuple(self._history))


class TaughtDomain(Generic[EpisodeT]):
    """A domain with a teacher."""

    new_episode: type[EpisodeT]

    def episode(self, payload: Mapping[str, Any]) -> EpisodeT:
        """Returns a new attempt. Raises `InvalidArgument` with the name of a wrong payload key."""
        return self.new_episode(payload)

    def demonstrate(
        self, payload: Mapping[str, Any], rng: Random, *, flawless: bool
    ) -> Demonstration:
        """Returns one attempt of the teacher, with or without its mistakes."""
        episode = self.episode(payload)
        rehearsal = Rehearsal(episode)
        self.teach(rehearsal, episode, rng, flawless=flawless)
        return rehearsal.finished()

    def teach(
        self, rehearsal: Rehearsal, episode: EpisodeT, rng: Random, *, flawless: bool
    ) -> None:
        """Records the teacher's actions."""
        raise NotImplementedError


def a_habit(habits: Mapping[str, float], rng: Random) -> str:
    """Draws one of the teacher's habits by its probability."""
    return rng.choices(list(habits), list(habits.values()))[0]


def tool_call_message(call_id: str, name: str, arguments: Mapping[str, Any]) -> Message:
    """Returns an assistant message with one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def function_tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """Returns an OpenAI tool definition; all parameters are required, with JSON type names."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }
