"""Token values in the output of `forge trajectories show`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from forge.cli.exports.trajectory_rows import TrajectoryRows
from forge.client.stored.token_values import CLIPPED, COLUMNS, MASKED, TurnValues
from forge.v1 import common_pb2

Values = Mapping[int, TurnValues]
"""By turn."""


class ValuedRows(TrajectoryRows):
    """Rows of trajectories with the token values of their turns."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def json_row(self, trajectory: common_pb2.Trajectory, /) -> dict[str, Any]:
        """The row, and `token_values`: a list with an object for each turn that has any."""
        stored = [_json_values(turn, one) for turn, one in sorted(self._values.items())]
        return super().json_row(trajectory) | {"token_values": stored}


def _json_values(turn_index: int, values: TurnValues) -> dict[str, Any]:
    columns = {name: list(getattr(values, name)) for name in COLUMNS}
    return {
        "turn_index": turn_index,
        "step": values.step,
        "weight_version": values.weight_version,
        **columns,
        "clipped": [bool(flag & CLIPPED) for flag in values.flags],
        "masked": [bool(flag & MASKED) for flag in values.flags],
    }


def summary_of(values: TurnValues | None) -> str:
    """The values of a turn on its line."""
    if values is None or not values.flags:
        return "no token values"
    low, high = min(values.log_ratios), max(values.log_ratios)
    parts = [
        f"step {values.step}: ratio {_ratio(low)} to {_ratio(high)}",
        f"entropy {fmean(values.entropies):.3g}",
        f"advantage {fmean(values.advantages):.3g}",
    ]
    for name, flag in (("clipped", CLIPPED), ("masked", MASKED)):
        if count := sum(bool(one & flag) for one in values.flags):
            parts.append(f"{count} {name}")
    return ", ".join(parts)


def _ratio(log_ratio: float) -> str:
    # Log ratios are stored up to 65,504.
    return f"{math.exp(log_ratio):.3g}" if log_ratio < 700 else f"e^{log_ratio:.3g}"
