"""A black-box agent: the tool loop over the unmodified `openai` SDK.

It gets only a base URL and a key, as any existing agent.
"""

from __future__ import annotations

from typing import Any, cast

# The SDK imports this at the first call, which would hold up the event loop.
import openai.resources.chat.completions  # noqa: F401
from openai import (
    APIConnectionError,
    AsyncOpenAI,
    BadRequestError,
    InternalServerError,
)

from forge.agents.conversation import RolloutConversation
from forge.agents.environments.base import Episode, Message, Transcript
from forge.agents.rollout import Rollout
from forge.agents.scaffolds.openai_client import shared_client
from forge.core.errors import InvalidArgument, Unavailable


class BlackBox:
    """Chat completions with tools, until an answer without a call."""

    def __init__(self, *, timeout_s: float, tls_ca: str = "") -> None:
        self._base = shared_client(timeout_s=timeout_s, tls_ca=tls_ca)
        self._models: dict[str, str] = {}

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """Runs one attempt through OpenAI's client; returns its transcript."""
        client = self._base.with_options(
            base_url=f"{rollout.gateway.http_url}/v1", api_key=rollout.session_token
        )
        model = await self._model(client)
        conversation = RolloutConversation(episode)
        settings = {"model": model} | _settings(rollout, episode)
        while conversation.calls < rollout.max_turns:
            try:
                completion = await client.chat.completions.create(
                    messages=cast(Any, conversation.context), **settings
                )
            except BadRequestError as error:
                if conversation.calls == 0:
                    raise InvalidArgument(f"the gateway refused the task: {error}") from error
                # The history exceeds the context of the model: a regular end of the attempt.
                break
            except (APIConnectionError, InternalServerError) as error:
                raise Unavailable(f"{rollout.gateway.http_url}: {error}") from error
            message = completion.choices[0].message.model_dump(exclude_none=True)
            if not await conversation.answered(_assistant(message)):
                break
        return conversation.transcript()

    async def close(self) -> None:
        """Closes the connections."""
        await self._base.close()

    async def _model(self, client: AsyncOpenAI) -> str:
        """Returns the name of the served model; one request per gateway."""
        url = str(client.base_url)
        if url not in self._models:
            try:
                page = await client.models.list()
            except (APIConnectionError, InternalServerError) as error:
                raise Unavailable(f"{url}: {error}") from error
            self._models[url] = page.data[0].id
        return self._models[url]


def _settings(rollout: Rollout, episode: Episode) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_tokens": rollout.max_tokens}
    if rollout.temperature is not None:
        settings["temperature"] = rollout.temperature
    if episode.tools:
        settings["tools"] = episode.tools
    return settings


def _assistant(message: dict[str, Any]) -> Message:
    """Returns the answer as a message of the next request."""
    message.setdefault("content", "")
    return message
