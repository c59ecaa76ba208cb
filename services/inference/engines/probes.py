"""The probe of a publication: new weights must compute the trainer's log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, isfinite
from statistics import fmean

from services.inference.engines.base import BrokenWeights, ModelLimits, Probe, UnfitWeights

PROBE_TOKENS = 16
"""Length of a probe of an engine's own."""
_LEFT_OUT = 8
"""The mean omits one error in 8, the largest ones: a near tie in the routes of a mixture of experts
changes single tokens by far more than rounding does."""
_TOLERANCE = 1e-3
"""Mean error of log-probs, in nats, above which weights are not those of the trainer."""
ROUNDED_TOLERANCE = 0.25
"""The same in 16 bits, for an engine that rounds each operation. docs/benchmarks/numerics.md has
the errors of right and of wrong weights."""


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


def computed_before_a_token(
    probe: Probe | None, limits: ModelLimits, *, version: int
) -> tuple[tuple[int, ...], Probe | None]:
    """Return tokens and probe for an engine that samples a token after each prompt. Both lose the
    last token if the context has no room for a sampled one. Raises UnfitWeights as `probe_ids`."""
    ids = probe_ids(probe, limits, version=version)[: limits.context_tokens - 1]
    if probe is not None:
        last = len(ids) - 1
        probe = replace(
            probe, ids=ids, logprobs=probe.logprobs[:last], published=probe.published[:last]
        )
    return ids, probe


def check_probe(
    probe: Probe | None,
    logprobs: Sequence[float],
    *,
    version: int,
    rounded: bool,
    rounded_tolerance: float = ROUNDED_TOLERANCE,
    exact_tolerance: float = _TOLERANCE,
) -> None:
    """Compare the log-probs of all tokens but the first. `rounded`: published or served in 16 bits;
    then `rounded_tolerance` is the largest mean error, in nats, else `exact_tolerance`, unless the
    probe has another limit of this kind.

    Raises UnfitWeights for other log-probs than the trainer's, BrokenWeights for NaN or infinity.
    """
    if not all(map(isfinite, logprobs)):
        raise BrokenWeights(f"weights {version} gave a log-prob that is not finite")
    if probe is None:
        return
    if rounded:
        tolerance, setting = probe.most_error or rounded_tolerance, "probe_error"
    else:
        tolerance, setting = probe.most_exact_error or exact_tolerance, "probe_exact_error"
    errors = sorted(abs(a - b) for a, b in zip(logprobs, probe.logprobs, strict=True))
    counted = errors[: max(1, len(errors) - ceil(len(errors) / _LEFT_OUT))]
    error = fmean(counted)
    if not error <= tolerance:
        raise UnfitWeights(
            f"weights {version}: log-probs of the probe differ from the trainer's by {error:.3g} "
            f"(mean), more than {tolerance}; the setting {setting} changes the limit"
        )


def check_published(
    probe: Probe | None, logprobs: Sequence[float], *, version: int, tolerance: float
) -> None:
    """Compare the log-probs of a pass in float32, which rounds nothing, with the trainer's under
    the published values, if the probe has them. `tolerance`: the largest mean error, in nats,
    unless the probe has a limit of passes that round nothing.

    Raises UnfitWeights, BrokenWeights as `check_probe`.
    """
    if probe is not None and probe.published:
        check_probe(
            replace(probe, logprobs=probe.published),
            logprobs,
            version=version,
            rounded=False,
            exact_tolerance=tolerance,
        )
