"""Advantages of the turns of a group, from the rewards that the pool has.

Owns the default rules: outcome and process with the default weights, above the mean of the group.
The trainer's settings may differ, and it adds speed and spreads of a whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from forge.client.reward_events import reward_component
from forge.core.credit.advantages import AdvantageRules, GroupReturns, batch_advantages
from forge.core.credit.rewards import RewardWeights, returns_to_go, turn_rewards
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2 as pb


def turn_advantages(group: Iterable[pb.TrajectorySummary]) -> dict[str, Sequence[float]]:
    """Returns the advantage of each turn of the sealed trajectories of a group, by trajectory id.

    Trajectories without turns, freed ones and those with contradicting or unknown rewards are
    absent, and count for no mean.
    """
    weights = RewardWeights()
    returns: dict[str, list[float]] = {}
    for one in group:
        if one.state != pb.TRAJECTORY_STATE_SEALED or not one.turns or one.freed:
            continue
        with suppress(InvalidArgument):
            components = [reward_component(each) for each in one.rewards]
            rewards_T = turn_rewards(components, turns=one.turns, weights=weights)
            returns[one.trajectory_id] = returns_to_go(rewards_T, gamma=weights.gamma)
    if not returns:
        return {}
    (credited,) = batch_advantages([GroupReturns(returns=[*returns.values()])], AdvantageRules())
    return dict(zip(returns, credited.advantages, strict=True))
