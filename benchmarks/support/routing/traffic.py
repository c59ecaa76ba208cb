"""Traffic of the routing benchmark: groups of multi-turn rollouts, and the workers that serve them.

`recorded` is a real run; all others are drawn. Another seed draws other groups, and another order
of the recorded ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

_SCALE = 16
_RECORDED = Path(__file__).parent / "recorded_groups.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Seconds of the embedded engine on one core."""

    pass_s: float
    """Time of a prefill pass, besides its tokens."""
    token_s: float
    """Per computed token."""
    context_s: float
    """Per computed token and token before it."""
    step_s: float
    """Time of a decode step, besides its requests."""
    row_s: float
    """Per running request."""
    kv_s: float
    """Per token of context that a step reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session."""

    new_tokens: int
    """Tokens after the answer before; of the first turn: all that its group does not share."""
    answer_tokens: int
    pause_s: float
    """From the answer before to this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One session."""

    group: str
    session: str
    common_tokens: int
    """First tokens that all groups share."""
    group_tokens: int
    """Tokens after them that its group shares."""
    turns: tuple[Turn, ...]


# `--measure`, two cores of an AMD EPYC, torch 2.13, CPU seconds of one thread.
TINY = EngineCosts(
    pass_s=5.8e-3, token_s=3.6e-5, context_s=6.4e-8, step_s=4.8e-3, row_s=3.4e-5, kv_s=2.0e-7
)
SMALL = EngineCosts(
    pass_s=2.8e-2, token_s=8.1e-4, context_s=7.6e-7, step_s=1.8e-2, row_s=2.5e-3, kv_s=1.5e-6
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Groups, and the engine that serves them."""

    groups: Sequence[Sequence[Rollout]]
    costs: EngineCosts
    concurrency: int = 8
    """Groups at once."""
    publish_every_s: float = 60.0
    """Interval of publications, in runs that have some."""
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """Speed of each worker."""
    lost_after_s: float = 0.0
    """Time at which the last worker leaves with its requests; 0: never."""


def recorded(*, groups: int, seed: int = 0) -> list[list[Rollout]]:
    """Return the first recorded groups, with all lengths times 16; in another order for each
    seed but 0."""
    found = []
    for number, group in enumerate(json.loads(_RECORDED.read_text())[:groups]):
        rollouts = []
        for index, turns in enumerate(group["rollouts"]):
            scaled = tuple(
                Turn(new_tokens=new * _SCALE, answer_tokens=answer * _SCALE, pause_s=pause)
                for new, answer, pause in turns
            )
            rollouts.append(
                Rollout(
                    group=f"g{number}",
                    session=f"g{number}:{index}:0",
                    common_tokens=0,
                    group_tokens=group["shared"] * _SCALE,
                    turns=scaled,
                )
            )
        found.append(rollouts)
    if seed:
        Random(seed).shuffle(found)
    return found


def agents(
    *,
    groups: int,
    seed: int = 0,
    prompt_tokens: int = 400,
    members: Sequence[int] = (8,),
    spread: float = 0.4,
) -> list[list[Rollout]]:
    """Return groups of rollouts, about six turns of 120 new and 60 sampled tokens on the prompt of
    their group; lengths are lognormal, and a group has a difficulty of its own.

    `members`: sizes of groups; `spread`: sigma of difficulties and of the numbers of turns."""
    random = Random(seed)

    def near(mean: float, sigma: float) -> int:
        return max(1, round(mean * random.lognormvariate(0, sigma)))

    found = []
    for number in range(groups):
        prompt, hard = near(prompt_tokens, 0.4), random.lognormvariate(0, spread)
        rollouts = []
        for index in range(members[number % len(members)]):
            turns = [
                Turn(
                    new_tokens=near(120, 0.5) if turn else 1,
                    answer_tokens=near(60 * hard, 0.6),
                    pause_s=2.0 * random.lognormvariate(0, 0.8) if turn else 0.0,
                )
                for turn in range(near(6, spread))
            ]
            rollouts.append(
                Rollout(
                    group=f"g{number}",
                    session=f"g{number}:{index}:0",
                    common_tokens=64,
                    group_tokens=prompt,
                    turns=tuple(turns),
                )
            )
        found.append(rollouts)
    return found


NAMES = (
    "recorded",
    "agents",
    "recorded_tiny",
    "long_prompts",
    "uneven",
    "slow_worker",
    "lost_worker",
)


def traffics(*, quick: bool, seed: int = 0) -> dict[str, Traffic]:
    """Return the traffic by name."""
    part = 2 if quick else 1
    real = recorded(groups=88 // part, seed=seed)
    drawn = agents(groups=48 // part, seed=seed)
    long = agents(groups=48 // part, seed=seed, prompt_tokens=3000)
    uneven = agents(groups=48 // part, seed=seed, members=(2, 4, 8, 16), spread=0.6)
    return {
        "recorded": Traffic(groups=real, costs=SMALL),
        "agents": Traffic(groups=drawn, costs=SMALL),
        # A step costs the same for one request as for many, and reading next to nothing.
        "recorded_tiny": Traffic(groups=real, costs=TINY, publish_every_s=10.0),
        "long_prompts": Traffic(groups=long, costs=SMALL),
        "uneven": Traffic(groups=uneven, costs=SMALL),
        "slow_worker": Traffic(groups=drawn, costs=SMALL, speeds=(1.0, 1.0, 1.0, 0.5)),
        "lost_worker": Traffic(groups=drawn, costs=SMALL, lost_after_s=200.0 / part),
    }
