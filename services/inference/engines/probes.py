"""The probe of a publication: whether new weights compute what the trainer computed with them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import median_low

from services.inference.engines.base import BrokenWeights, ModelLimits, Probe, UnfitWeights

PROBE_TOKENS = 16
"""Length of a probe of an engine's own."""
_TOLERANCE = 0.01
"""Median error of log-probs, in nats, above which weights are not those of the trainer."""
_ROUNDED_TOLERANCE = 0.5
"""Rounding to 16 bits gives about 0.05; bytes of another type give several nats."""


def probe_ids(probe: Probe | None, limits: ModelLimits, *, version: int) -> tuple[int, ...]:
    """Return the tokens to compute: those of the probe, else an engine's own. Raises UnfitWeights
    for a probe that the model cannot compute."""
    count = min(PROBE_TOKENS, limits.context_tokens)
    ids = probe.ids if probe else tuple(n % limits.vocabulary for n in range(count))
    if len(ids) > limits.context_tokens or max(ids) >= limits.vocabulary:
        raise UnfitWeights(
            f"weights {version}: their probe has {len(ids)} tokens up to {max(ids)}; this model "
            f"takes {limits.context_tokens} up to {limits.vocabulary - 1}"
        )
    return ids


def check_probe(
    probe: Probe | None, logprobs: Sequence[float], *, version: int, rounded: bool
) -> None:
    """Compare the log-probs of all tokens but the first. `rounded`: published or served in 16 bits.

    Raises UnfitWeights for other log-probs than the trainer's, BrokenWeights for NaN or infinity.
    """
    if not all(map(isfinite, logprobs)):
        raise BrokenWeights(f"weights {version} gave a log-prob that is not finite")
    if probe is None:
        return
    tolerance = _ROUNDED_TOLERANCE if rounded else _TOLERANCE
    # The median: a near tie in the routes of a mixture of experts may change single tokens.
    error = median_low(abs(a - b) for a, b in zip(logprobs, probe.logprobs, strict=True))
    if not error <= tolerance:
        raise UnfitWeights(
            f"weights {version}: log-probs of the probe differ from the trainer's by {error:.3g} "
            f"(median), more than {tolerance}"
        )
