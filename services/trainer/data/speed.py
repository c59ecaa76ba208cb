"""The speed of rollouts, from the times that are recorded with them.

Owns where a completion time comes from, and the measured baseline of each domain. The baseline is
of the steps before a batch and one for all its rollouts, so those of a group have the same
yardstick. It is computed from the history of steps, which every checkpoint holds.
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
"""Speed reward of earlier runners: turns at a nominal second each. Not counted."""


def completion_of(trajectory: pb.Trajectory, *, tokens_per_s: float) -> float | None:
    """Seconds; None when not every time it needs is on record."""
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


def told_speed(trajectory: pb.Trajectory) -> float | None:
    """The sum of the speed rewards that its task gave; None without any."""
    told = [
        event.value
        for event in trajectory.rewards
        if event.kind == pb.REWARD_KIND_SPEED and event.name != _RETIRED
    ]
    return sum(told) if told else None


def speeds_of(
    told: Sequence[float | None],
    completions_s: Sequence[float | None],
    *,
    baseline_s: float | None,
) -> list[float | None]:
    """Speed of each rollout of a group, by one measure for all: the task's where it gave one to any
    of them, else completion time over the domain's baseline; None where it is not known."""
    if any(speed is not None for speed in told):
        return list(told)
    return [
        speed_reward(seconds, baseline_s) if seconds is not None and baseline_s else None
        for seconds in completions_s
    ]


def speed_baselines(steps: Sequence[trainer_pb2.StepMetrics]) -> Mapping[str, float]:
    """Usual completion time of each domain in the last steps, in seconds; none where too few
    rollouts are known."""
    batches: dict[str, list[MeasuredBatch]] = {}
    for step in steps[-BASELINE_STEPS:]:
        for name, own in step.domains.items():
            batches.setdefault(name, []).append(
                MeasuredBatch(rollouts=own.timed_trajectories, median_s=own.completion_s)
            )
    known = {name: measured_baseline_s(measured) for name, measured in batches.items()}
    return {name: seconds for name, seconds in known.items() if seconds is not None}
