"""The errors of a probe that refuse weights."""

from __future__ import annotations

import pytest

from services.inference.engines.base import Probe, UnfitWeights
from services.inference.engines.probes import check_probe

PROBE = Probe(ids=tuple(range(16)), logprobs=(-2.0,) * 15)


def found(*, wrong: int, error: float) -> list[float]:
    """Log-probs of which so many differ."""
    return [-2.0 + error] * wrong + [-2.0] * (15 - wrong)


@pytest.mark.parametrize(("rounded", "tolerance"), [(False, 1e-3), (True, 0.25), (True, 0.12)])
def test_mean_error_beside_the_two_largest_decides(rounded: bool, tolerance: float) -> None:
    """A near tie of a router changes single tokens, by any error; less than half of the tokens
    suffice to refuse weights."""

    def check(logprobs: list[float]) -> None:
        check_probe(
            PROBE, logprobs, version=1, rounded=rounded, rounded_tolerance=max(tolerance, 0.12)
        )

    check(found(wrong=2, error=9.0))
    check(found(wrong=15, error=0.99 * tolerance))
    for wrong in (5, 15):
        with pytest.raises(UnfitWeights, match="mean"):
            check(found(wrong=wrong, error=1.01 * tolerance * 13 / (wrong - 2)))


def test_probe_of_two_tokens_has_one_error() -> None:
    """The shortest probe."""
    probe = Probe(ids=(1, 2), logprobs=(-2.0,))
    check_probe(probe, [-2.0], version=1, rounded=False)
    with pytest.raises(UnfitWeights):
        check_probe(probe, [-2.1], version=1, rounded=False)
