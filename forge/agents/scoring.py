"""From what happened to reward events.

Owns the composition: the domain's score, the speed reward, and a reward function of the user's
own. What a task is worth, its domain says; how components add up, the trainer.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from forge.agents.environments.base import Domain, Episode, Reward, Transcript
from forge.client.turns import reward_event
from forge.core.errors import ForgeError
from forge.core.rewards import speed_reward
from forge.v1 import common_pb2 as pb

NOMINAL_TURN_S = 1.0
"""What a turn counts for in the speed reward: its real time would measure the cluster."""

RewardFunction = Callable[
    [Transcript, Mapping[str, Any]], Sequence[Reward] | Awaitable[Sequence[Reward]]
]
"""Called with what happened and the task's payload; `async def` or plain."""


class ScoringError(ForgeError):
    """A domain or a reward function gave what cannot be a reward."""


class Scorer:
    """Scores the rollouts of one runner."""

    def __init__(self, reward_functions: Mapping[str, RewardFunction], *, timeout_s: float) -> None:
        self._functions = dict(reward_functions)
        self._timeout_s = timeout_s

    async def score(
        self, domain: Domain, episode: Episode, transcript: Transcript, payload: Mapping[str, Any]
    ) -> list[pb.RewardEvent]:
        """Reward events of one rollout. Raises `ScoringError`.

        What a reward function returns is added to the domain's score; an outcome among it takes
        the place of the domain's.
        """
        rewards = [*episode.score(transcript), _speed(domain, transcript)]
        if function := self._functions.get(domain.name):
            own = await self._call(function, transcript, payload)
            if any(reward.kind == "outcome" for reward in own):
                rewards = [reward for reward in rewards if reward.kind != "outcome"]
            rewards += own
        return _events(rewards, transcript.turns, domain.name)

    async def _call(
        self, function: RewardFunction, transcript: Transcript, payload: Mapping[str, Any]
    ) -> Sequence[Reward]:
        """Call it away from the event loop, for a limited time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                rewards = await asyncio.to_thread(function, transcript, payload)
                return await rewards if inspect.isawaitable(rewards) else rewards
        except TimeoutError:
            raise ScoringError(f"reward function took over {self._timeout_s:g} s") from None


def _speed(domain: Domain, transcript: Transcript) -> Reward:
    completion_s = transcript.turns * NOMINAL_TURN_S + transcript.tool_s
    value = speed_reward(completion_s, domain.par_turns * NOMINAL_TURN_S)
    return Reward(name="completion_time", kind="speed", value=value)


def _events(rewards: Sequence[Reward], turns: int, domain: str) -> list[pb.RewardEvent]:
    outcomes = sum(reward.kind == "outcome" for reward in rewards)
    if outcomes != 1:
        raise ScoringError(f"domain {domain} gave {outcomes} outcome rewards; must be exactly one")
    for reward in rewards:
        if not math.isfinite(reward.value):
            raise ScoringError(f"domain {domain}: reward {reward.name} is {reward.value}")
        if not -1 <= reward.turn_index < turns:
            raise ScoringError(
                f"domain {domain}: reward {reward.name} credits turn {reward.turn_index} of {turns}"
            )
    return [
        reward_event(
            reward.name,
            reward.value,
            kind=reward.kind,
            turn_index=reward.turn_index,
            key=str(index),
        )
        for index, reward in enumerate(rewards)
    ]
