"""The bookkeeping of one agent loop: messages so far, tool calls carried out, what failed.

Owns the execution of tool calls and the counts a score needs. It calls no model and decides
nothing about what the model sees.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from forge.agents.environments.base import Episode, Message, ToolError, Transcript


class Conversation:
    """What happened in one rollout, in order."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.context: list[Message] = list(episode.messages)
        """What the next call sends."""
        self.calls = 0
        """Model calls so far, context management included: the index of the next turn."""
        self._record: list[Message] = list(self.context)
        self._answer = ""
        self._tool_calls = 0
        self._failed: list[int] = []
        self._tool_s = 0.0

    def add(self, *messages: Message) -> None:
        """Append messages to the context and to the record."""
        self.context.extend(messages)
        self._record.extend(messages)

    def fold(self, summary: Message, context: Sequence[Message]) -> None:
        """Take the model's summary, and go on from `context` instead of all that was said."""
        self.calls += 1
        self._record.append(summary)
        self.context = list(context)

    async def answered(self, message: Message) -> bool:
        """Take the model's answer and carry out its tool calls; whether there were any."""
        turn_index = self.calls
        self.calls += 1
        self.add(message)
        self._answer = message.get("content") or ""
        requested: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
        if not requested:
            return False
        began_s = time.perf_counter()
        outcomes = await asyncio.gather(*(self._carry_out(call) for call in requested))
        self._tool_s += time.perf_counter() - began_s
        self._tool_calls += len(requested)
        for call, (text, failed) in zip(requested, outcomes, strict=True):
            self.add({"role": "tool", "tool_call_id": call["id"], "content": text})
            if failed:
                self._failed.append(turn_index)
        return True

    def transcript(self) -> Transcript:
        """What a score may depend on."""
        return Transcript(
            answer=self._answer,
            turns=self.calls,
            tool_calls=self._tool_calls,
            failed_calls=tuple(self._failed),
            tool_s=self._tool_s,
            messages=tuple(self._record),
        )

    async def _carry_out(self, call: Mapping[str, Any]) -> tuple[str, bool]:
        """(result or error text, whether it failed) of one tool call."""
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
