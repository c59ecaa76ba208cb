"""Trajectories and their rewards as plain data, and the advantages of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from forge.core.credit.advantages import AdvantageRules, GroupReturns, batch_advantages
from forge.core.credit.rewards import (
    RewardComponent,
    RewardKind,
    RewardWeights,
    returns_to_go,
    turn_rewards,
)
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2 as pb

KINDS: Mapping[int, RewardKind] = {
    pb.REWARD_KIND_OUTCOME: "outcome",
    pb.REWARD_KIND_PROCESS: "process",
    pb.REWARD_KIND_SPEED: "speed",
    pb.REWARD_KIND_AGENT: "agent",
}


def state_name(state: pb.TrajectoryState.ValueType) -> str:
    """open, sealed or abandoned."""
    return pb.TrajectoryState.Name(state).removeprefix("TRAJECTORY_STATE_").lower()


def reward_row(reward: pb.RewardEvent) -> dict[str, Any]:
    """One reward component."""
    kind = KINDS.get(reward.kind, "")
    return {"name": reward.name, "kind": kind, "value": reward.value, "turn": reward.turn_index}


def summary_row(one: pb.TrajectorySummary) -> dict[str, Any]:
    """A trajectory of a list."""
    outcomes = [each.value for each in one.rewards if each.kind == pb.REWARD_KIND_OUTCOME]
    return {
        "id": one.trajectory_id,
        "task_id": one.task_id or one.trajectory_id.partition(":")[0],
        "domain": one.domain,
        "state": state_name(one.state),
        "turns": one.turns,
        "sampled_tokens": one.sampled_tokens,
        "versions": [one.min_weight_version, one.max_weight_version],
        "closed": one.sealed_unix_s,
        "reason": one.reason,
        "freed": one.freed,
        "outcome": sum(outcomes) if outcomes else None,
        "rewards": [reward_row(each) for each in one.rewards],
    }


def advantages_of(group: Iterable[pb.TrajectorySummary]) -> dict[str, list[float]]:
    """Advantages of the turns of sealed rollouts, by trajectory id: outcome and process with the
    default weights, above the group's mean. The trainer's settings may differ."""
    weights = RewardWeights()
    returns: dict[str, list[float]] = {}
    for one in group:
        if one.state != pb.TRAJECTORY_STATE_SEALED or not one.turns or one.freed:
            continue
        components = [
            RewardComponent(kind=KINDS[each.kind], value=each.value, turn_index=each.turn_index)
            for each in one.rewards
            if each.kind in KINDS
        ]
        with suppress(InvalidArgument):
            rewards_T = turn_rewards(components, turns=one.turns, weights=weights)
            returns[one.trajectory_id] = returns_to_go(rewards_T, gamma=weights.gamma)
    if not returns:
        return {}
    (credited,) = batch_advantages([GroupReturns(returns=[*returns.values()])], AdvantageRules())
    return dict(zip(returns, credited.advantages, strict=True))
