"""Converts a transcript to reward events.

Owns the combination of the domain's score and the user's reward function, which
`forge.agents.scoring.reward_pool` runs. The trainer adds the components up. Speed is not scored
here: the gateway records the times, and the trainer compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.agents.environments.base import Domain, Episode, Reward, Transcript
from forge.agents.rewards import NoReward, RewardTask, components
from forge.agents.scoring.reward_pool import RewardPool
from forge.client.reward_events import reward_event
from forge.core.errors import ForgeError
from forge.v1 import common_pb2 as pb


class ScoringError(ForgeError):
    """A domain or a reward function returned invalid rewards."""


async def score(
    functions: RewardPool,
    domain: Domain,
    episode: Episode,
    transcript: Transcript,
    task: RewardTask,
) -> list[pb.RewardEvent]:
    """Returns the reward events of one rollout. Raises `ScoringError`, `RewardError`.

    The components of a reward function are added to the domain's score; its outcome replaces the
    domain's.
    """
    rewards = _checked(episode.score(transcript), domain.name)
    if domain.name in functions.domains:
        user_rewards = await functions.score(transcript, task)
        if any(reward.kind == "outcome" for reward in user_rewards):
            rewards = [reward for reward in rewards if reward.kind != "outcome"]
        rewards += _checked(user_rewards, domain.name)
    return _events(rewards, transcript.turns, domain.name)


def _checked(returned: object, domain: str) -> list[Reward]:
    try:
        return components(returned, function=domain)
    except NoReward as error:
        raise ScoringError(f"domain {domain}: its score {error}") from None


def _events(rewards: Sequence[Reward], turns: int, domain: str) -> list[pb.RewardEvent]:
    outcomes = sum(reward.kind == "outcome" for reward in rewards)
    if outcomes != 1:
        raise ScoringError(f"domain {domain} gave {outcomes} outcome rewards; must be exactly one")
    for reward in rewards:
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
