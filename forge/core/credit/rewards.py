"""The composite reward of a trajectory: rewards and returns of its turns.

Owns the formulas `r_t = alpha*process_t + outcome_t` (plus `agent*agent_t`, what the agent says of
itself, if that has a weight), `G_t = sum_{p>=t} gamma^(p-t) r_p` and the
speed part `beta*speed` (MiniMax Forge, arXiv 2605.26494, composite reward). Speed has a formula of
its own because it differs between any two rollouts: as a part of `r_t` it would set the spread of
an otherwise flat group. The environment gives the rewards of a task; baselines are in
`forge.core.credit.advantages`, completion times in `forge.core.credit.completion_time`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from msgspec import Meta

from forge.core.errors import InvalidArgument

RewardKind = Literal["outcome", "process", "speed", "agent"]
MAX_REWARD = 1e6
"""Largest magnitude of a reward; a larger one is an error of its source."""
MAX_NAME_BYTES = 256
"""Longest name of a reward, in UTF-8: each read of a trajectory has the names of its rewards."""

_ROUNDING = 1e-9
"""Rounding error of a quotient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComponent:
    """One reward of one turn."""

    kind: RewardKind
    value: float
    turn_index: int
    """Credited turn, from 0; -1: the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWeights:
    """Weights of the reward components."""

    alpha: float = 0.2
    """Weight of process rewards."""
    agent: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Weight of the rewards that agents give themselves (tasks with agent_rewards); 0: not counted.
    They add at most this to the return of a trajectory."""
    beta: float = 0.1
    """Weight of speed, added after the advantages are divided by their spread."""
    speed_step: Annotated[float, Meta(ge=1e-3, le=1)] = 0.05
    """Speeds count in steps of this size from the group's mean; less than one step is noise of
    tools and clocks. Near the domain's usual completion time, 0.05 is a fifth of that time."""
    gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Discount per turn of later rewards; 1 credits every turn with the full outcome."""


def check_name(name: str) -> None:
    """Raises `InvalidArgument` for a name that is too long."""
    length = len(name.encode())
    if length > MAX_NAME_BYTES:
        raise InvalidArgument(
            f"reward {name[:40]!r} has a name of {length} bytes; at most {MAX_NAME_BYTES}"
        )


def check_value(name: str, value: float, *, most: float = MAX_REWARD) -> None:
    """Raises `InvalidArgument` for a reward that is not finite, or beyond -`most` to `most`."""
    # NaN compares as false.
    if not abs(value) <= most:
        raise InvalidArgument(
            f"reward {name!r} has value {value}; must be finite and from {-most:.0f} to {most:.0f}"
        )


def speed_reward(completion_s: float, baseline_s: float) -> float:
    """Return the speed of a rollout, relative to a baseline: `1 / (1 + completion/baseline)`.

    1 at time 0, 1/2 at the baseline, towards 0 beyond: strictly decreasing, so that a shorter
    critical path (parallel tool calls, fewer turns) always pays, and bounded, so that no outlier
    dominates a group. `completion_s` must be net of queueing and engine time, or the
    reward measures the cluster. Raises `InvalidArgument` unless `completion_s >= 0` and
    `baseline_s > 0`, both finite.
    """
    if not (math.isfinite(completion_s) and completion_s >= 0):
        raise InvalidArgument(f"completion_s is {completion_s}; must be finite and >= 0")
    if not (math.isfinite(baseline_s) and baseline_s > 0):
        raise InvalidArgument(f"baseline_s is {baseline_s}; must be finite and > 0")
    return 1.0 / (1.0 + completion_s / baseline_s)


def turn_rewards(
    components: Iterable[RewardComponent], *, turns: int, weights: RewardWeights
) -> list[float]:
    """Return `r_t` of each of `turns` turns, without speed (`speed_credits`).

    Raises `InvalidArgument` for an infinite value, an unknown turn, or a second outcome: two are
    never added.
    """
    components = list(components)
    outcomes = [component.value for component in components if component.kind == "outcome"]
    if len(outcomes) > 1:
        raise InvalidArgument(f"the trajectory has {len(outcomes)} outcomes ({outcomes}), not one")
    reported = math.fsum(abs(each.value) for each in components if each.kind == "agent")
    scale = {
        "outcome": 1.0,
        "process": weights.alpha,
        "speed": 0.0,
        # However many reports an agent sends, together they count as one.
        "agent": weights.agent / max(1.0, reported),
    }
    rewards_T = [0.0] * turns
    for component in components:
        if not math.isfinite(component.value):
            raise InvalidArgument(f"{component.kind} reward is {component.value}; must be finite")
        turn = turns - 1 if component.turn_index == -1 else component.turn_index
        if not 0 <= turn < turns:
            raise InvalidArgument(
                f"reward credits turn {component.turn_index} of a trajectory of {turns} turns"
            )
        rewards_T[turn] += scale[component.kind] * component.value
    return rewards_T


def returns_to_go(rewards_T: Sequence[float], *, gamma: float) -> list[float]:
    """Return `G_t = r_t + gamma * G_{t+1}` of each turn."""
    returns_T = [0.0] * len(rewards_T)
    following = 0.0
    for turn in reversed(range(len(rewards_T))):
        following = rewards_T[turn] + gamma * following
        returns_T[turn] = following
    return returns_T


def speed_credits(speeds: Sequence[float | None], weights: RewardWeights) -> list[float]:
    """Return the part of speed in each rollout's last turn, net of the group's mean.

    `beta * trunc((speed_i - mean) / step) * step`: zero within one step of the mean, so that noise
    adds nothing, and never scaled by a spread. `None` is an unknown speed; it gets 0 and is
    ignored, and so is a single rollout.
    """
    known = [speed for speed in speeds if speed is not None]
    if len(known) < 2:
        return [0.0] * len(speeds)
    mean, step = fmean(known), weights.speed_step

    def steps(speed: float) -> int:
        """Return the whole steps from the mean, equal for equal distances above and below."""
        distance = (speed - mean) / step
        return math.trunc(distance + math.copysign(_ROUNDING, distance))

    return [0.0 if speed is None else weights.beta * step * steps(speed) for speed in speeds]
