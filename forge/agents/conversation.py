"""The state of one agent loop: messages, executed tool calls, failures.

Owns the execution of tool calls and the counts that a score needs. It calls no model and does not
choose the context.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from forge.agents.environments.base import Episode, Message, ToolError, Transcript


class RolloutConversation:
    """Messages and tool calls of one rollout, in order."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.context: list[Message] = list(episode.messages)
        """Messages of the next call."""
        self.calls = 0
        """Model calls so far, including context actions: the index of the next turn."""
        self._record: list[Message] = list(self.context)
        self._answer = ""
        self._tool_calls = 0
        self._failed: list[int] = []
        self._tool_s = 0.0

    def add(self, *messages: Message) -> None:
        """Appends messages to the context and to the record."""
        self.context.extend(messages)
        self._record.extend(messages)

    def fold(self, summary: Message, context: Sequence[Message]) -> None:
        """Records the model's summary and replaces the context."""
        self.calls += 1
        self._record.append(summary)
        self.context = list(context)

    async def answered(self, message: Message) -> bool:
        """Records the model's answer and executes its tool calls; returns False without any."""
        turn_index = self.calls
        self.calls += 1
        self.add(message)
        self._answer = message.get("content") or ""
        requested: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
        if not requested:
            return False
        began_s = time.perf_counter()
        results = await asyncio.gather(*(self._execute(call) for call in requested))
        self._tool_s += time.perf_counter() - began_s
        self._tool_calls += len(requested)
        for call, (text, failed) in zip(requested, results, strict=True):
            self.add({"role": "tool", "tool_call_id": call["id"], "content": text})
            if failed:
                self._failed.append(turn_index)
        return True

    def transcript(self) -> Transcript:
        """Returns the input of a score."""
        return Transcript(
            answer=self._answer,
            turns=self.calls,
            tool_calls=self._tool_calls,
            failed_calls=tuple(self._failed),
            tool_s=self._tool_s,
            messages=tuple(self._record),
        )

    async def _execute(self, call: Mapping[str, Any]) -> tuple[str, bool]:
        """Executes one tool call; returns its result or error text, and True for an error."""
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ToolError("arguments must be a JSON object")
            return await self._episode.call(function["name"], arguments), False
        except json.JSONDecodeError as error:
            return f"error: arguments are not JSON: {error}", True
        except ToolError as error:
            return f"error: {error}", True
