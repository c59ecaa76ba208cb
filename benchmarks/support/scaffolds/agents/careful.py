"""A careful agent over Anthropic's SDK: streamed, in a role of its own."""

from __future__ import annotations

import json
from typing import Any, cast

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from anthropic.types import Message as AnthropicMessage

from benchmarks.support.scaffolds.agents.attempt import MODEL, Attempt
from forge.agents.environments.base import Episode, Transcript
from forge.agents.rollout import Rollout

SYSTEM = "You are a careful agent. {task}"


class Careful:
    """A tool loop over messages with content blocks."""

    def __init__(self, *, timeout_s: float, tls_ca: str = "") -> None:
        self._base = AsyncAnthropic(
            api_key="set per rollout",
            timeout=timeout_s,
            max_retries=4,
            http_client=DefaultAsyncHttpxClient(verify=tls_ca or True, trust_env=False),
        )

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """As `Scaffold.run`."""
        attempt = Attempt(rollout, episode)
        client = self._base.copy(base_url=rollout.gateway.http_url, api_key=rollout.session_token)
        history: list[Any] = list(attempt.dialogue)
        ask = _settings(attempt)
        with attempt.refusals():
            while not attempt.over:
                async with client.messages.stream(messages=history, **ask) as stream:
                    answer = cast(AnthropicMessage, await stream.get_final_message())
                calls = [block for block in answer.content if block.type == "tool_use"]
                results = await attempt.answered(
                    "".join(block.text for block in answer.content if block.type == "text"),
                    [(call.id, call.name, json.dumps(call.input)) for call in calls],
                )
                if not calls:
                    break
                history += [
                    {"role": "assistant", "content": answer.content},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": call.id, "content": result}
                            for call, result in zip(calls, results, strict=True)
                        ],
                    },
                ]
        return attempt.transcript()

    async def close(self) -> None:
        """Closes the connections."""
        await self._base.close()


def _settings(attempt: Attempt) -> dict[str, Any]:
    """Returns the fields that every request of an attempt has."""
    system = SYSTEM.format(task=attempt.system).strip()
    ask: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": attempt.rollout.max_tokens,
        "system": system,
    }
    if attempt.tools:
        ask["tools"] = [
            {
                "name": tool["name"],
                "description": tool["description"],
                "input_schema": tool["parameters"],
            }
            for tool in attempt.tools
        ]
    return ask
