"""The speed of rollouts, from their recorded times.

Owns the completion time of a trajectory and the measured baseline of each domain. One baseline,
from the steps before the batch, applies to all rollouts of a batch. It is computed from the history
of steps, which every checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forge.core.credit.completion_time import (
    BASELINE_STEPS,
    MeasuredBatch,
    TurnTime,
    completion_s,
    measured_baseline_s,
)
from forge.core.credit.rewards import speed_reward
from forge.core.errors import InvalidArgument
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.telemetry import log
from forge.v1 import common_pb2 as pb
from forge.v1 import trainer_pb2

_RETIRED = "completion_time"
"""Speed reward of earlier runners, a nominal second per turn. Not counted."""


def completion_of(trajectory: pb.Trajectory, *, tokens_per_s: float) -> float | None:
    """Completion time in seconds; None when a needed time is not recorded."""
    timed = all(turn.HasField("turns_before") for turn in trajectory.turns)
    if not (trajectory.turns and timed and trajectory.HasField("closing_agent_s")):
        return None
    turns = [
        TurnTime(
            sampled_tokens=len(turn.sampled.ids) // TOKEN_BYTES,
            agent_s=turn.timings.agent_s,
            turns_before=turn.turns_before,
        )
        for turn in trajectory.turns
    ]
    try:
        return completion_s(
            turns, closing_agent_s=trajectory.closing_agent_s, tokens_per_s=tokens_per_s
        )
    except InvalidArgument as error:
        log.warning("completion_unknown", trajectory_id=trajectory.trajectory_id, error=str(error))
        return None


def reported_speed(trajectory: pb.Trajectory) -> float | None:
    """The sum of the speed rewards that the task reported; None without any."""
    rewards = [
        event.value
        for event in trajectory.rewards
        if event.kind == pb.REWARD_KIND_SPEED and event.name != _RETIRED
    ]
    return sum(rewards) if rewards else None


def speeds_of(
    reported: Sequence[float | None],
    completions_s: Sequence[float | None],
    *,
    baseline_s: float | None,
) -> list[float | None]:
    """Speed of each rollout of a group; None where unknown. All have one measure: the reported
    speeds if there are any, else completion time relative to the domain's baseline."""
    if any(speed is not None for speed in reported):
        return list(reported)
    return [
        speed_reward(seconds, baseline_s) if seconds is not None and baseline_s else None
        for seconds in completions_s
    ]


def speed_baselines(steps: Sequence[trainer_pb2.StepMetrics]) -> Mapping[str, float]:
    """Usual completion time of each domain in the last steps, in seconds; domains with too few
    timed rollouts are absent."""
    batches: dict[str, list[MeasuredBatch]] = {}
    for step in steps[-BASELINE_STEPS:]:
        for name, own in step.domains.items():
            batches.setdefault(name, []).append(
                MeasuredBatch(rollouts=own.timed_trajectories, median_s=own.completion_s)
            )
    known = {name: measured_baseline_s(measured) for name, measured in batches.items()}
    return {name: seconds for name, seconds in known.items() if seconds is not None}
