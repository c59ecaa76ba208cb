"""Quality of weight versions, from trained trajectories: mean reward, and the log-prob gap.

For the comparison of a canary with its base. Pure; a step adds its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

from forge.rl.losses.stats import VersionGap

_KEPT = 256
"""Versions remembered: those of the newest tokens."""


@dataclass(slots=True)
class Quality:
    """Sums over the samples of one version."""

    trajectories: int = 0
    """Sampled by this version alone."""
    reward_sum: float = 0.0
    """Outcomes of these trajectories."""
    tokens: int = 0
    """Trained tokens."""
    gap_sum: float = 0.0
    """|log pi_trainer - log pi_behavior| of these tokens, staleness included."""

    @property
    def mean_reward(self) -> float:
        """NaN without a trajectory."""
        return self.reward_sum / self.trajectories if self.trajectories else nan

    @property
    def logprob_gap(self) -> float:
        """NaN without a token."""
        return self.gap_sum / self.tokens if self.tokens else nan


class Qualities:
    """The quality of each version."""

    def __init__(self) -> None:
        self._by_version: dict[int, Quality] = {}

    def of(self, version: int) -> Quality:
        """The sums of a version, zero for an unknown one."""
        return self._by_version.get(version, Quality())

    def add(self, outcomes: Mapping[int, Sequence[float]], gaps: Mapping[int, VersionGap]) -> None:
        """Add outcomes and gaps of a trained batch, by version."""
        for version, rewards in outcomes.items():
            quality = self._by_version.setdefault(version, Quality())
            quality.trajectories += len(rewards)
            quality.reward_sum += sum(rewards)
        for version, gap in gaps.items():
            quality = self._by_version.setdefault(version, Quality())
            quality.tokens += gap.tokens
            quality.gap_sum += gap.gap_sum
        for old in sorted(self._by_version)[:-_KEPT]:
            del self._by_version[old]
