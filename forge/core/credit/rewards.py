"""The composite reward of a trajectory: what each turn earned and what it led to.

Owns the formulas `r_t = alpha*process_t + outcome_t`, `G_t = sum_{p>=t} gamma^(p-t) r_p` and the
speed part `beta*speed` (MiniMax Forge, arXiv 2605.26494, composite reward). Speed has a formula of
its own because it differs between any two rollouts: as a part of `r_t` it would set the spread of a
group that is otherwise flat. Which rewards a task gives is its environment's; the baseline of a
return is in `forge.core.credit.advantages`, the completion time in
`forge.core.credit.completion_time`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from msgspec import Meta

from forge.core.errors import InvalidArgument

RewardKind = Literal["outcome", "process", "speed"]

_ROUNDING = 1e-9
"""Of a quotient that counts as whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComponent:
    """One scored fact about one turn."""

    kind: RewardKind
    value: float
    turn_index: int
    """The turn credited, counted from 0; -1 credits the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWeights:
    """How the components add up."""

    alpha: float = 0.2
    """Weight of process rewards."""
    beta: float = 0.1
    """Weight of speed, added after the advantages are divided by their spread."""
    speed_step: Annotated[float, Meta(ge=1e-3, le=1)] = 0.05
    """Speeds count in whole steps of this, from the group's mean on. 0.05 is a fifth of the
    domain's usual completion time near that time: less is noise of tools and clocks."""
    gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Discount per turn of what comes later; 1 credits every turn with the full outcome."""


def speed_reward(completion_s: float, baseline_s: float) -> float:
    """How quickly a rollout finished, relative to a baseline: `1 / (1 + completion/baseline)`.

    1 for no time at all, 1/2 at the baseline, towards 0 beyond: strictly decreasing, so that a
    shorter critical path (parallel tool calls, fewer turns) always pays, and bounded, so that no
    outlier dominates a group. `completion_s` must be net of queueing and engine time, or the
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
    """`r_t` of each of `turns` turns. Speed has no part in it: `speed_credits` has.

    Raises `InvalidArgument` for a value that is not finite or a turn that does not exist.
    """
    scale = {"outcome": 1.0, "process": weights.alpha, "speed": 0.0}
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
    """`G_t = r_t + gamma * G_{t+1}` for each turn."""
    returns_T = [0.0] * len(rewards_T)
    following = 0.0
    for turn in reversed(range(len(rewards_T))):
        following = rewards_T[turn] + gamma * following
        returns_T[turn] = following
    return returns_T


def speed_credits(speeds: Sequence[float | None], weights: RewardWeights) -> list[float]:
    """What speed adds to the last turn of each rollout of a group, net of the group's mean.

    `beta * trunc((speed_i - mean) / step) * step`: zero within one step of the mean, so that noise
    adds nothing, and never scaled by a spread. `None` is a rollout whose speed is not known; it
    takes no part and gets 0, as does a rollout without another to compare with.
    """
    known = [speed for speed in speeds if speed is not None]
    if len(known) < 2:
        return [0.0] * len(speeds)
    mean, step = fmean(known), weights.speed_step

    def steps(speed: float) -> int:
        """Rounding must not part what lies as far above the mean from what lies below it."""
        away = (speed - mean) / step
        return math.trunc(away + math.copysign(_ROUNDING, away))

    return [0.0 if speed is None else weights.beta * step * steps(speed) for speed in speeds]
