"""Common part of the scaffolds: the state of one attempt, and the errors that end it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anthropic
import openai

from forge.agents.conversation import RolloutConversation
from forge.agents.environments.base import Episode, Message, Transcript
from forge.agents.rollout import Rollout
from forge.core.errors import InvalidArgument, Unavailable

MODEL = "policy"


class Attempt:
    """One attempt at a task: its texts, its tools and its record."""

    def __init__(self, rollout: Rollout, episode: Episode) -> None:
        self.rollout = rollout
        self.tools: Sequence[dict[str, Any]] = [tool["function"] for tool in episode.tools]
        """Name, description and parameters of each function."""
        self.system = "\n".join(
            message["content"] for message in episode.messages if message["role"] == "system"
        )
        self.dialogue: list[Message] = [
            message for message in episode.messages if message["role"] != "system"
        ]
        """The messages of user and assistant that the task begins with."""
        self._conversation = RolloutConversation(episode)

    @property
    def over(self) -> bool:
        """True after the last turn that the task allows."""
        return self._conversation.calls >= self.rollout.max_turns

    async def answered(self, text: str, calls: Sequence[tuple[str, str, str]] = ()) -> list[str]:
        """Records an answer and executes its calls, each (id, name, JSON arguments); returns their
        results in this order, none for an answer without calls."""
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": json}}
                for call_id, name, json in calls
            ]
        if not await self._conversation.answered(message):
            return []
        return [result["content"] for result in self._conversation.context[-len(calls) :]]

    def transcript(self) -> Transcript:
        """As `Conversation.transcript`."""
        return self._conversation.transcript()

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Translates the errors of both SDKs. A refusal after the first turn ends the block: the
        history exceeds the context of the model, a regular end of the attempt."""
        try:
            yield
        except (openai.BadRequestError, anthropic.BadRequestError) as error:
            if self._conversation.calls == 0:
                raise InvalidArgument(f"the gateway refused the task: {error}") from error
        except (
            openai.APIConnectionError,
            openai.InternalServerError,
            anthropic.APIConnectionError,
            anthropic.InternalServerError,
        ) as error:
            raise Unavailable(f"{self.rollout.gateway.http_url}: {error}") from error
