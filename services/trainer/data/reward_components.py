"""Means of the named rewards of a batch, for metrics alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from forge.v1 import common_pb2 as pb

MOST_NAMES = 32
"""Names with a mean: the most frequent ones, so that graders cannot make metrics grow."""


def reward_components(trajectories: Iterable[pb.Trajectory]) -> dict[str, float]:
    """By name: the mean, over the trajectories that have such a reward, of the sum of its values.
    Leaves out what agents say of themselves."""
    sums: defaultdict[str, float] = defaultdict(float)
    owners: Counter[str] = Counter()
    for trajectory in trajectories:
        own = [one for one in trajectory.rewards if one.kind != pb.REWARD_KIND_AGENT]
        owners.update({one.name for one in own})
        for one in own:
            sums[one.name] += one.value
    return {name: sums[name] / count for name, count in sorted(owners.most_common(MOST_NAMES))}
