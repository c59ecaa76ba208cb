"""Demonstrations: conversations in which a scripted teacher attempts a task.

Owns their shape and the bookkeeping of a rehearsal: tool calls are carried out and answered as a
scaffold would, and a fold leads to the same messages as in `forge.agents.environments.folding`.
What the teacher does, mistakes included, is each domain's business. Nothing here knows tokens or
models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from forge.agents.environments.base import Message, ToolError
from forge.agents.environments.folding import fold_request, folded

ToolRunner = Callable[[str, Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Everything one attempt leaves to learn from."""

    tools: tuple[dict[str, Any], ...]
    contexts: tuple[tuple[Message, ...], ...]
    """Branches of the conversation, each ending with an answer; every assistant message in them
    is the teacher's, and to be imitated."""


class Rehearsal:
    """Keeps a teacher's conversation the way a scaffold keeps a model's."""

    def __init__(
        self, initial: Sequence[Message], tools: Sequence[dict[str, Any]], run_tool: ToolRunner
    ) -> None:
        self._initial = list(initial)
        self._history = list(initial)
        self._tools = tuple(tools)
        self._run_tool = run_tool
        self._contexts: list[tuple[Message, ...]] = []
        self._calls = 0

    def call(self, name: str, /, **arguments: Any) -> str:
        """The teacher makes one tool call; returns the result it got to read."""
        call_id = f"call_{self._calls}"
        self._calls += 1
        self._history.append(tool_call_message(call_id, name, arguments))
        try:
            result = self._run_tool(name, arguments)
        except ToolError as error:
            result = str(error)
        self._history.append({"role": "tool", "tool_call_id": call_id, "content": result})
        return result

    def say(self, text: str) -> None:
        """The teacher answers without a call."""
        self._history.append({"role": "assistant", "content": text})

    def fold(self, fold_prompt: str, summary: str) -> None:
        """The teacher is asked for a summary, writes it, and goes on from it alone."""
        self._history = fold_request(self._history, fold_prompt)
        self.say(summary)
        self._close_context()
        self._history = folded(self._initial, summary)

    def finished(self) -> Demonstration:
        """What there is to learn from the rehearsal, now that it is over."""
        self._close_context()
        return Demonstration(tools=self._tools, contexts=tuple(self._contexts))

    def _close_context(self) -> None:
        self._contexts.append(tuple(self._history))


def a_habit(habits: Mapping[str, float], rng: Random) -> str:
    """One of the teacher's habits, as often as it is given to it."""
    return rng.choices(list(habits), list(habits.values()))[0]


def tool_call_message(call_id: str, name: str, arguments: Mapping[str, Any]) -> Message:
    """An assistant message that makes one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def function_tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """An OpenAI tool definition; every parameter is required, its value a JSON type name."""
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
