"""The engine of inference that sampled a turn, and its outcome rewards."""

from __future__ import annotations

from collections.abc import Iterable

from forge.v1 import common_pb2 as pb

SEVERAL = "several"
"""Name for turns that moved between engines, and trajectories with turns of several engines."""
UNKNOWN = "unknown"
"""Name for records of an earlier release, and of workers of one."""


def engine_of(turn: pb.Turn) -> str:
    """Return the engine of a turn."""
    return SEVERAL if "+" in turn.engine else turn.engine or UNKNOWN


def engine_of_all(turns: Iterable[pb.Turn]) -> str:
    """Return the engine of all turns of a trajectory."""
    names = {engine_of(turn) for turn in turns}
    return SEVERAL if len(names) > 1 else next(iter(names), UNKNOWN)
