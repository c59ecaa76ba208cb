"""Means of the named rewards of a batch, for metrics alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from forge.v1 import common_pb2 as pb

MOST_NAMES = 32
"""Names with a mean: the most frequent ones, so that graders cannot make metrics grow."""


def named_rewards(trajectory: pb.Trajectory) -> tuple[tuple[str, float], ...]:
    """Name and value of each reward of a trajectory, without those of kind agent."""
    counted = [one for one in trajectory.rewards if one.kind != pb.REWARD_KIND_AGENT]
    return tuple((one.name, one.value) for one in counted)


def reward_components(trajectories: Iterable[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """By name: the mean, over the trajectories that have such a reward, of the sum of its values.
    Each trajectory has its `named_rewards`."""
    sums: defaultdict[str, float] = defaultdict(float)
    owners: Counter[str] = Counter()
    for own in trajectories:
        owners.update({name for name, _ in own})
        for name, value in own:
            sums[name] += value
    return {name: sums[name] / count for name, count in sorted(owners.most_common(MOST_NAMES))}
