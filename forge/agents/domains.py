"""Domains by name, as one runner knows them.

Owns the order in which a name is looked up: the runner's own settings, Forge's domains, then,
where only a reward function was given, a domain that is nothing but prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from forge.agents.environments import get_domain
from forge.agents.environments.base import (
    Domain,
    Episode,
    Message,
    Reward,
    ToolError,
    Transcript,
)
from forge.agents.environments.payload import required
from forge.core.errors import InvalidArgument, NotFound


class Domains:
    """The domains a runner can score."""

    def __init__(self, extra: Mapping[str, Domain], *, rewarded: frozenset[str]) -> None:
        """`rewarded` names the domains that have a reward function."""
        self._known = dict(extra)
        self._rewarded = rewarded

    def get(self, name: str) -> Domain:
        """The domain of that name. Raises `NotFound`."""
        if name not in self._known:
            try:
                self._known[name] = get_domain(name)
            except NotFound:
                if name not in self._rewarded:
                    raise
                self._known[name] = PromptDomain(name)
        return self._known[name]


class PromptDomain:
    """Tasks that are a prompt, and optionally a system message; a reward function scores them.

    Payload keys: `prompt`, `system`.
    """

    scaffold = "blackbox"
    max_turns = 64

    def __init__(self, name: str) -> None:
        self.name = name

    def generate(self, rng: Random) -> dict[str, Any]:
        """Raises `InvalidArgument`: such tasks are written, not generated."""
        raise InvalidArgument(f"domain {self.name} generates no tasks: submit your own prompts")

    def episode(self, payload: Mapping[str, Any]) -> Episode:
        messages = [{"role": "user", "content": required(payload, "prompt", str)}]
        if "system" in payload:
            messages.insert(0, {"role": "system", "content": required(payload, "system", str)})
        return _PromptEpisode(messages)


class _PromptEpisode:
    """Nothing to act on, nothing to score."""

    tools: list[dict[str, Any]] = []

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise ToolError(f"there is no tool {name!r}")

    def score(self, transcript: Transcript) -> list[Reward]:
        return []

    async def close(self) -> None:
        """Nothing is held."""
