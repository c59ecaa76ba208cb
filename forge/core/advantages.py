"""Advantages: how much better a turn did than its group expected.

Owns the group baselines `B_i` of `A_it = G_it - B_i` and the optional scaling by the group's
spread. Returns come from `forge.core.rewards`; losses take the advantages as given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

Baseline = Literal["group_mean", "leave_one_out", "none"]

_FLAT = 1e-9
"""A spread of total returns below this is rounding: the group has nothing to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages of one group."""

    advantages: list[list[float]]
    """Per rollout, per turn."""
    flat: bool
    """Every rollout's total return is the same, so outcomes teach nothing about this task."""


def group_advantages(
    returns_GT: Sequence[Sequence[float]], *, baseline: Baseline, normalize_std: bool
) -> GroupAdvantages:
    """Compare the returns-to-go of one group's rollouts with the group's baseline.

    `returns_GT[i][t]` is `G_it`; the total return of rollout i is `G_i0`. The baseline is the
    mean total return of the group, of the others in the group (leave-one-out; RLOO, arXiv
    2402.14740), or 0. `normalize_std` divides by the standard deviation of the total returns, as
    GRPO does (arXiv 2402.03300). A rollout without turns takes no part; one without others to
    compare with is its own baseline.
    """
    totals_G = [returns_T[0] for returns_T in returns_GT if returns_T]
    spread = pstdev(totals_G) if totals_G else 0.0
    flat = spread <= _FLAT * max(1.0, max(map(abs, totals_G), default=0.0))
    scale = 1.0 / spread if normalize_std and not flat else 1.0
    return GroupAdvantages(
        advantages=[
            [scale * (value - bias) for value in returns_T]
            for returns_T, bias in zip(
                returns_GT, _baselines(returns_GT, totals_G, baseline), strict=True
            )
        ],
        flat=flat,
    )


def _baselines(
    returns_GT: Sequence[Sequence[float]], totals_G: Sequence[float], baseline: Baseline
) -> list[float]:
    if baseline == "none" or not totals_G:
        return [0.0] * len(returns_GT)
    if baseline == "group_mean" or len(totals_G) == 1:
        return [fmean(totals_G)] * len(returns_GT)
    total, others = math.fsum(totals_G), len(totals_G) - 1
    return [(total - returns_T[0]) / others if returns_T else 0.0 for returns_T in returns_GT]
