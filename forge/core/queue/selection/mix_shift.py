"""Shift: the distance of the mix of some groups from the mix of the queue.

Owns the kinds of groups, and their Kullback-Leibler divergence less its mean for groups drawn by
chance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from forge.core.queue.groups import Group

DIFFICULTY_BINS = 4


class GroupTraits(NamedTuple):
    """Traits of a group that has ended."""

    duration: int
    """Half octaves."""
    domain: str
    difficulty: int


UNKNOWN = GroupTraits(0, "", -1)
"""Started under another leader, or trained on before a rewind."""


def kind_of(group: Group, duration_s: float) -> GroupTraits:
    """The kind of a group of that duration."""
    difficulty = min(int(group.spec.difficulty * DIFFICULTY_BINS), DIFFICULTY_BINS - 1)
    half_octave = math.floor(2 * math.log2(max(duration_s, 1e-3)))
    return GroupTraits(half_octave, group.spec.domain, difficulty)


def shift_kl(
    counts: Mapping[GroupTraits, float],
    expected: Mapping[GroupTraits, float],
    *,
    drawn: int | None = None,
) -> float:
    """Sum over the traits of the divergence beyond chance; `drawn`: how many of the groups were
    drawn by chance, all by default."""
    return sum(
        _divergence(_by_trait(counts, trait), _by_trait(expected, trait), drawn)
        for trait in range(len(UNKNOWN))
    )


def _by_trait(counts: Mapping[GroupTraits, float], trait: int) -> defaultdict[object, float]:
    totals: defaultdict[object, float] = defaultdict(float)
    for kind, count in counts.items():
        totals[kind[trait]] += count
    return totals


def _divergence(
    counts: Mapping[object, float], expected: Mapping[object, float], drawn: int | None
) -> float:
    kinds = counts.keys() | expected.keys()
    groups = sum(counts.values())
    if not groups:
        return 0.0
    # Half a group more of each kind: a new kind in the batch is rare, not impossible.
    total = sum(expected.values()) + 0.5 * len(kinds)
    divergence = sum(
        count / groups * math.log(count / groups * total / (expected.get(kind, 0.0) + 0.5))
        for kind, count in counts.items()
        if count
    )
    # For a fair batch of n groups, 2 n times the divergence is chi-squared distributed.
    chance = (len(kinds) - 1) / (2 * groups)
    return max(0.0, divergence - chance * (1.0 if drawn is None else drawn / groups))
