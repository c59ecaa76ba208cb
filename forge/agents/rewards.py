"""The arguments and the return value of reward functions.

    def reward(trajectory: Transcript, task: RewardTask) -> RewardComponents:
        return trajectory.answer == task.payload["expected"]

Owns these types and the check of returned values. `reward_pool` and `reward_worker` run the
functions, `scoring` combines the components.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args

from forge.agents.environments.base import Reward, RewardKind, Transcript
from forge.core.credit.rewards import MAX_REWARD

RewardComponents = float | Reward | Sequence[Reward]
"""A single number is the outcome."""
RewardFunction = Callable[
    [Transcript, "RewardTask"], RewardComponents | Awaitable[RewardComponents]
]
"""`async def` or plain."""

_WANTED = "must be a finite number, a Reward or a list of them"
_KINDS = get_args(RewardKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTask:
    """The attempted task."""

    task_id: str
    domain: str
    payload: Mapping[str, Any]
    """The payload as submitted, including the expected answer."""


class NoReward(ValueError):
    """A function returned a value that is no reward; the message has the value."""


def components(returned: object, *, function: str) -> list[Reward]:
    """Returns the reward components in a function's return value. Raises `NoReward`."""
    if isinstance(returned, Real):
        return [Reward(name=function, kind="outcome", value=_finite(returned, "returned"))]
    if isinstance(returned, Reward):
        return [_component(returned)]
    if isinstance(returned, list | tuple | Iterator):
        return [_component(each) for each in returned]
    raise NoReward(f"returned {_shown(returned)}; {_WANTED}")


def _component(reward: object) -> Reward:
    if not isinstance(reward, Reward):
        raise NoReward(f"returned {_shown(reward)} in a list; {_WANTED}")
    if not (isinstance(reward.name, str) and reward.name):
        raise NoReward(f"returned a Reward with the name {_shown(reward.name)}; must be a text")
    if reward.kind not in _KINDS:
        kinds = ", ".join(_KINDS)
        raise NoReward(f"reward {reward.name!r} has kind {_shown(reward.kind)}; one of {kinds}")
    turn: object = reward.turn_index
    if isinstance(turn, bool) or not isinstance(turn, Integral):
        index = _shown(turn)
        raise NoReward(f"reward {reward.name!r} has turn_index {index}; must be a whole number")
    value = _finite(reward.value, f"reward {reward.name!r} has value")
    return Reward(name=reward.name, kind=reward.kind, value=value, turn_index=int(turn))


def _finite(value: object, what: str) -> float:
    try:
        # Not float(): it would accept "1.5" too.
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:
        raise NoReward(f"{what} {_shown(value)}; must be a finite number up to {MAX_REWARD:.0f}")
    return number


def _shown(value: object) -> str:
    return f"{value!r:.80}"
