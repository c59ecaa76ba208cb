"""Advantages: the return of a turn above its baseline.

Owns the baselines `B_i` of `A_it = (G_it - B_i) / spread + speed_it`, the optional scaling by a
spread of returns, and the weights of domains. Baseline, spread and flatness are of outcome and
process alone. Returns come from `forge.core.credit.rewards`; losses take the advantages as
given.

A token of several samples is credited once per sample: their advantages add up in the gradient,
since the same log-prob enters the loss with each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Literal

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Spread = Literal["none", "group", "batch", "domain"]

SPREAD_FLOOR = 0.01
"""Default of the smallest divisor. One malformed call (0.2) in a group of up to 400 rollouts has a
larger spread and is normalized in full; a smaller spread is noise of graded rewards."""
_FLAT = 1e-9
"""A spread of total returns below this is rounding: the group has no signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRules:
    """Rules that turn returns into advantages."""

    baseline: Baseline = "group_mean"
    """B: mean total return of the group, of the others in it (leave-one-out; RLOO, arXiv
    2402.14740), of the whole batch (REINFORCE++, arXiv 2501.03262), or 0."""
    spread: Spread = "none"
    """Divide by the standard deviation of the total returns: of the group, as GRPO does (arXiv
    2402.03300), or, less the baselines, of the whole batch or of the domain's share of it."""
    spread_floor: float = SPREAD_FLOOR
    """Smallest divisor: advantages are at most `1 / spread_floor` times the differences of
    returns."""
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    """Factor on the advantages of a domain; 1 unless named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReturns:
    """Returns of the rollouts of one task."""

    returns: Sequence[Sequence[float]]
    """Per rollout i and turn t the return-to-go `G_it` of outcome and process; `G_i0` is the total
    return."""
    speed: Sequence[Sequence[float]] = ()
    """Per rollout and turn the part of speed in the advantage, weighted and net of the group's mean
    (`forge.core.credit.rewards.speed_credits`); empty: none."""
    domain: str = ""

    @property
    def totals(self) -> list[float]:
        """Total returns of the rollouts with turns; the others are ignored."""
        return [returns_T[0] for returns_T in self.returns if returns_T]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages of one group."""

    advantages: list[list[float]]
    """Per rollout, per turn."""
    flat: bool
    """Whether all total returns are equal: outcome and process give no signal. Speeds may
    differ."""


def batch_advantages(
    groups: Sequence[GroupReturns], rules: AdvantageRules
) -> list[GroupAdvantages]:
    """Return the advantages of a batch's groups, in order.

    A single rollout is its own baseline. A spread of zero does not scale.
    """
    batch_totals = [total for group in groups for total in group.totals]
    baselines = [_baselines(group, rules.baseline, batch_totals) for group in groups]
    scales = _scales(groups, baselines, rules)
    return [
        GroupAdvantages(
            advantages=_advantages(group, biases, scale, rules), flat=_is_flat(group.totals)
        )
        for group, biases, scale in zip(groups, baselines, scales, strict=True)
    ]


def _advantages(
    group: GroupReturns, biases: Sequence[float], scale: float, rules: AdvantageRules
) -> list[list[float]]:
    weight = rules.domain_weights.get(group.domain, 1.0)
    speed = group.speed or [[0.0] * len(returns_T) for returns_T in group.returns]
    return [
        [weight * (scale * (value - bias) + extra)
         for value, extra in zip(returns_T, speed_T, strict=True)]
        for returns_T, speed_T, bias in zip(group.returns, speed, biases, strict=True)
    ]  # fmt: skip


def _baselines(
    group: GroupReturns, baseline: Baseline, batch_totals: Sequence[float]
) -> list[float]:
    returns_GT, totals_G = group.returns, group.totals
    if baseline == "none" or not totals_G:
        return [0.0] * len(returns_GT)
    if baseline == "batch_mean":
        return [fmean(batch_totals)] * len(returns_GT)
    if baseline == "group_mean" or len(totals_G) == 1:
        return [fmean(totals_G)] * len(returns_GT)
    total, others = math.fsum(totals_G), len(totals_G) - 1
    return [(total - returns_T[0]) / others if returns_T else 0.0 for returns_T in returns_GT]


def _scales(
    groups: Sequence[GroupReturns], baselines: Sequence[Sequence[float]], rules: AdvantageRules
) -> list[float]:
    """Return one factor per group."""
    spread, floor = rules.spread, rules.spread_floor
    if spread == "none":
        return [1.0] * len(groups)
    if spread == "group":
        return [_inverse_spread(group.totals, floor) for group in groups]
    pools: dict[str, list[float]] = {}
    for group, biases in zip(groups, baselines, strict=True):
        pool = pools.setdefault(group.domain if spread == "domain" else "", [])
        pool.extend(
            returns_T[0] - bias
            for returns_T, bias in zip(group.returns, biases, strict=True)
            if returns_T
        )
    factors = {name: _inverse_spread(pool, floor) for name, pool in pools.items()}
    return [factors[group.domain if spread == "domain" else ""] for group in groups]


def _inverse_spread(totals: Sequence[float], floor: float) -> float:
    return 1.0 if _is_flat(totals) else 1.0 / max(floor, pstdev(totals))


def _is_flat(totals: Sequence[float]) -> bool:
    spread = pstdev(totals) if totals else 0.0
    return spread <= _FLAT * max(1.0, max(map(abs, totals), default=0.0))
