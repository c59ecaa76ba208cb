"""95 % confidence intervals of means over tasks.

A task is the unit: its value is the mean over its attempts, so attempts at one task, which are not
independent, count once. Tasks are in strata (domains); the mean over all is the mean of the strata
weighted by their number of tasks.

The interval is Student's, with additional pseudo-observations at the ends of the scale. Without
them 24 equal values would give an interval of width 0. For one proportion these are Agresti and
Coull's two successes and two failures ("Approximate is better than exact", The American
Statistician 52, 1998); for a paired difference Agresti and Min's, half a task at each end and one
at 0 ("Simple improved confidence intervals for comparing matched proportions", Statistics in
Medicine 24, 2005). The strata share them by weight. The degrees of freedom of several
strata are Welch and Satterthwaite's.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final, NamedTuple

CONFIDENCE: Final = 0.95
_Z: Final = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


class Interval(NamedTuple):
    """Ends of a confidence interval, both included."""

    low: float
    high: float


class _Pseudo(NamedTuple):
    """Pseudo-observations: their number, mean and mean square."""

    number: float
    mean: float
    square: float


def mean_interval(strata: Sequence[Sequence[float]]) -> Interval | None:
    """Return the interval of the mean of values in [0, 1], or in their own range if it is larger.
    None without a value."""
    values = [value for stratum in strata for value in stratum]
    low, high = min([0.0, *values]), max([1.0, *values])
    pseudo = _Pseudo(number=4.0, mean=(low + high) / 2, square=(low**2 + high**2) / 2)
    return _interval(strata, pseudo, low=low, high=high)


def change_interval(strata: Sequence[Sequence[float]]) -> Interval | None:
    """Return the interval of the mean of paired differences, after less before of the same task:
    values in [-1, 1], or in their own range if it is larger. None without a value."""
    widest = max([1.0, *(abs(value) for stratum in strata for value in stratum)])
    pseudo = _Pseudo(number=2.0, mean=0.0, square=widest**2 / 2)
    return _interval(strata, pseudo, low=-widest, high=widest)


def _interval(
    strata: Sequence[Sequence[float]], pseudo: _Pseudo, *, low: float, high: float
) -> Interval | None:
    tasks = sum(map(len, strata))
    if not tasks:
        return None
    center = variance = squares = 0.0
    for stratum in strata:
        if not stratum:
            continue
        share = len(stratum) / tasks
        added = pseudo.number * share
        count = len(stratum) + added
        mean = (math.fsum(stratum) + added * pseudo.mean) / count
        square = (math.fsum(value**2 for value in stratum) + added * pseudo.square) / count
        # At least one degree of freedom: one task has pseudo-observations too.
        freedom = max(1.0, count - 1.0)
        own = share**2 * max(0.0, square - mean**2) / freedom
        center += share * mean
        variance += own
        squares += own**2 / freedom
    half = _student_t(variance**2 / squares) * math.sqrt(variance) if squares else 0.0
    return Interval(max(low, center - half), min(high, center + half))


def _student_t(freedom: float) -> float:
    """Return the quantile of Student's distribution for `CONFIDENCE`, by its expansion in
    1 / freedom (Abramowitz and Stegun 26.7.5); within one percent from 2 degrees of freedom on."""
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
