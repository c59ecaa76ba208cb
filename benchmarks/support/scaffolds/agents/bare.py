"""A bare agent over OpenAI's responses: the question alone, then only new items."""

from __future__ import annotations

from typing import Any

# The SDK imports this at the first call, which would hold up the event loop.
import openai.resources.responses  # noqa: F401
from openai.types.responses import Response, ResponseFunctionToolCall

from benchmarks.support.scaffolds.agents.attempt import MODEL, Attempt
from forge.agents.environments.base import Episode, Transcript
from forge.agents.rollout import Rollout
from forge.agents.scaffolds.openai_client import shared_client


class Bare:
    """A tool loop without instructions and examples, whose history the gateway keeps."""

    def __init__(self, *, timeout_s: float, tls_ca: str = "") -> None:
        self._base = shared_client(timeout_s=timeout_s, tls_ca=tls_ca)

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """As `Scaffold.run`."""
        attempt = Attempt(rollout, episode)
        client = self._base.with_options(
            base_url=f"{rollout.gateway.http_url}/v1", api_key=rollout.session_token
        )
        items: list[Any] = [attempt.dialogue[-1]]
        ask: dict[str, Any] = {"model": MODEL, "max_output_tokens": rollout.max_tokens}
        if attempt.tools:
            ask["tools"] = [{"type": "function", **tool} for tool in reversed(attempt.tools)]
        with attempt.refusals():
            while not attempt.over:
                response: Response = await client.responses.create(input=items, **ask)
                calls = [
                    item for item in response.output if isinstance(item, ResponseFunctionToolCall)
                ]
                results = await attempt.answered(
                    response.output_text,
                    [(call.call_id, call.name, call.arguments) for call in calls],
                )
                if not calls:
                    break
                ask["previous_response_id"] = response.id
                items = [
                    {"type": "function_call_output", "call_id": call.call_id, "output": result}
                    for call, result in zip(calls, results, strict=True)
                ]
        return attempt.transcript()

    async def close(self) -> None:
        """Closes the connections."""
        await self._base.close()
