"""The domains of one runner, by name.

Owns the order of the look-up: the runner's settings, Forge's domains, and, for a name with only a
reward function, `PromptDomain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from forge.agents.environments import DOMAINS, get_domain
from forge.agents.environments.base import (
    Domain,
    Episode,
    Message,
    PlainEpisode,
    Reward,
    ToolError,
    Transcript,
)
from forge.agents.environments.payload import required
from forge.core.errors import InvalidArgument, NotFound


class Domains:
    """The domains that a runner can score."""

    def __init__(self, extra: Mapping[str, Domain], *, rewarded: frozenset[str]) -> None:
        """`rewarded` names the domains that have a reward function."""
        self._known = dict(extra)
        self._rewarded = rewarded

    @property
    def names(self) -> frozenset[str]:
        """Every domain that `get` returns."""
        return frozenset(DOMAINS) | self._known.keys() | self._rewarded

    def get(self, name: str) -> Domain:
        """Returns the domain with this name. Raises `NotFound`."""
        if name not in self._known:
            try:
                self._known[name] = get_domain(name)
            except NotFound:
                if name not in self._rewarded:
                    raise
                self._known[name] = PromptDomain(name)
        return self._known[name]


class PromptDomain:
    """Tasks with a prompt and an optional system message, scored by a reward function.

    Payload keys: `prompt`, `system`.
    """

    scaffold = "blackbox"
    max_turns = 64

    def __init__(self, name: str) -> None:
        self.name = name

    def generate(self, rng: Random) -> dict[str, Any]:
        """Raises `InvalidArgument`: users write these tasks."""
        raise InvalidArgument(f"domain {self.name} generates no tasks: submit your own prompts")

    def episode(self, payload: Mapping[str, Any]) -> Episode:
        """Returns a new attempt. Raises `InvalidArgument` with the name of a wrong payload key."""
        messages = [{"role": "user", "content": required(payload, "prompt", str)}]
        if "system" in payload:
            messages.insert(0, {"role": "system", "content": required(payload, "system", str)})
        return _PromptEpisode(messages)


class _PromptEpisode(PlainEpisode):
    """An attempt without tools and without a score."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise ToolError(f"there is no tool {name!r}")

    def score(self, transcript: Transcript) -> list[Reward]:
        return []
