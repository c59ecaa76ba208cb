"""Limits of sampling parameters that gateways, workers and trainers agree on. Pure.

Powers of two: equal in float32, which the wire has, and in float64.
"""

from __future__ import annotations

MIN_TEMPERATURE = 2.0**-16
"""Temperatures below it sample greedily. A logit divided by one of them may be infinite, which
looks like broken weights, and a gradient has its inverse as a factor."""
MIN_REPETITION_PENALTY = 2.0**-20


def effective_temperature(temperature: float) -> float:
    """Return the temperature of the distribution that is sampled; 0: greedily."""
    return 0.0 if 0 <= temperature < MIN_TEMPERATURE else temperature
