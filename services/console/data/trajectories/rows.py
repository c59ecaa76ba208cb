"""Trajectories and their rewards as plain data."""

from __future__ import annotations

from typing import Any

from forge.client.reward_events import REWARD_KINDS, reward_sum
from forge.core.enum_words import enum_word
from forge.v1 import common_pb2 as pb


def reward_row(reward: pb.RewardEvent) -> dict[str, Any]:
    """One reward component."""
    kind = REWARD_KINDS.get(reward.kind, "")
    return {"name": reward.name, "kind": kind, "value": reward.value, "turn": reward.turn_index}


def facts(one: pb.TrajectorySummary | pb.Trajectory) -> dict[str, Any]:
    """The part of a trajectory that a list and its own page show."""
    return {
        "id": one.trajectory_id,
        "task_id": one.task_id or one.trajectory_id.partition(":")[0],
        "domain": one.domain,
        "state": enum_word(pb.TrajectoryState, one.state),
        "reason": one.reason,
        "closed": one.sealed_unix_s,
        "rewards": [reward_row(each) for each in one.rewards],
    }


def summary_row(one: pb.TrajectorySummary) -> dict[str, Any]:
    """A trajectory of a list."""
    return facts(one) | {
        "turns": one.turns,
        "sampled_tokens": one.sampled_tokens,
        "versions": [one.min_weight_version, one.max_weight_version],
        "freed": one.freed,
        "outcome": reward_sum(one.rewards),
    }
