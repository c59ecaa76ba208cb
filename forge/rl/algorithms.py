"""The algorithms by name: objective, bounds, normalization and baseline of each.

Owns the presets and the loading of custom losses; imports no torch. `losses.objectives` has the
formulas, docs/algorithms.md the reasons for the defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from forge.core.credit.advantages import Baseline, Spread
from forge.core.errors import ConfigError, InvalidArgument
from forge.core.extras import import_named

Normalization = Literal["token", "sequence", "trajectory", "global", "trajectory_global"]
OF_TRAJECTORIES: Mapping[Normalization, Normalization] = {
    "sequence": "trajectory",
    "global": "trajectory_global",
}
"""Normalizations by samples, each with the same one by trajectories."""
SEQUENCE_RATIOS = ("gspo", "rloo")
"""Algorithms with one ratio for a whole sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Defaults of an algorithm."""

    clip_low: float = 0.0
    clip_high: float = 0.0
    """Bounds of the ratio, 1 - low and 1 + high; both 0: this algorithm does not clip."""
    normalization: Normalization = "token"
    normalization_tokens: int = 1
    """Divisor of `global`, besides the number of samples."""
    baseline: Baseline = "group_mean"
    spread: Spread = "none"
    critic: bool = False
    """A critic computes advantages from returns: baseline and spread must be none."""


PRESETS: Mapping[str, Algorithm] = {
    "cispo": Algorithm(),
    "grpo": Algorithm(clip_low=0.2, clip_high=0.2, normalization="sequence", spread="group"),
    "dr_grpo": Algorithm(
        clip_low=0.2, clip_high=0.2, normalization="global", normalization_tokens=1024
    ),
    "dapo": Algorithm(clip_low=0.2, clip_high=0.28, spread="group"),
    "gspo": Algorithm(clip_low=3e-4, clip_high=4e-4, normalization="sequence", spread="group"),
    "rloo": Algorithm(
        clip_low=0.2, clip_high=0.2, normalization="global", baseline="leave_one_out"
    ),
    "reinforce_pp": Algorithm(clip_low=0.2, clip_high=0.2, baseline="batch_mean", spread="batch"),
    "reinforce": Algorithm(),
    "ppo": Algorithm(clip_low=0.2, clip_high=0.2, baseline="none", critic=True),
    "ppo_clip": Algorithm(clip_low=0.2, clip_high=0.2),
}
CUSTOM = Algorithm()
"""Defaults of a custom loss."""


def preset(algorithm: str) -> Algorithm:
    """The preset of a name or of `package.module:function`. Raises `InvalidArgument`."""
    if algorithm in PRESETS:
        return PRESETS[algorithm]
    module, colon, function = algorithm.partition(":")
    if not (colon and function.isidentifier() and all(map(str.isidentifier, module.split(".")))):
        raise InvalidArgument(
            f"objective.algorithm = {algorithm!r} is not allowed: one of {', '.join(PRESETS)}, or "
            "package.module:function"
        )
    return CUSTOM


def load_custom(algorithm: str, options: Mapping[str, float]) -> Callable[..., Any]:
    """The named function with its options bound: a `forge.rl.losses.LossFunction`.

    Raises `InvalidArgument` when it cannot be imported or does not accept the options.
    """
    module_name, _, name = algorithm.partition(":")
    try:
        function: Any = getattr(import_named(module_name), name)
    except (ConfigError, AttributeError) as error:
        raise InvalidArgument(f"objective.algorithm = {algorithm!r}: {error}") from error
    try:
        inspect.signature(function).bind(None, **options)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"objective.algorithm = {algorithm!r}, loss_options = {dict(options)!r}: {error}; "
            "it is called as loss(tokens, **loss_options)"
        ) from error
    return partial(function, **options)
