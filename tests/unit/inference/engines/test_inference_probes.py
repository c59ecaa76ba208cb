"""The errors of a probe that refuse weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge.runtime.weights import WeightProbe
from services.inference.config import InferenceConfig
from services.inference.engines.base import BrokenWeights, ModelLimits, Probe, UnfitWeights
from services.inference.engines.probes import (
    check_probe,
    check_published,
    computed_before_a_token,
)
from services.inference.worker.weights.follower import _probe_of

PROBE = Probe(ids=tuple(range(16)), logprobs=(-2.0,) * 15)


def found(*, wrong: int, error: float) -> list[float]:
    """15 log-probs; `wrong` of them differ by `error`."""
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


@pytest.mark.parametrize(
    ("probe", "rounded", "setting"),
    [
        (replace(PROBE, most_error=0.5), True, "probe_error"),
        (replace(PROBE, most_exact_error=0.5), False, "probe_exact_error"),
    ],
)
def test_limit_of_the_setting_replaces_that_of_the_engine(
    probe: Probe, rounded: bool, setting: str
) -> None:
    """The refusal names the setting. The limit of the other kind of passes stays."""
    check_probe(probe, found(wrong=15, error=0.49), version=1, rounded=rounded)
    with pytest.raises(UnfitWeights, match=f"more than 0.5; the setting {setting} changes"):
        check_probe(probe, found(wrong=15, error=0.51), version=1, rounded=rounded)
    with pytest.raises(UnfitWeights, match="mean"):
        check_probe(probe, found(wrong=15, error=0.49), version=1, rounded=not rounded)


def test_log_probs_of_published_values_have_their_own_limit() -> None:
    """In a pass that rounds nothing; without them nothing is compared."""
    probe = replace(PROBE, published=(-3.0,) * 15)
    right = [-3.0] * 15
    check_published(probe, right, version=1, tolerance=2e-4)
    check_published(PROBE, right, version=1, tolerance=2e-4)
    wide = replace(probe, most_error=1.0)
    with pytest.raises(UnfitWeights, match=r"differ from the trainer's by 0.0003 .*exact_error"):
        check_published(wide, [-3.0003] * 15, version=1, tolerance=2e-4)
    exact = replace(probe, most_exact_error=4e-4)
    check_published(exact, [-3.0003] * 15, version=1, tolerance=2e-4)
    with pytest.raises(BrokenWeights):
        check_published(exact, [float("nan")] * 15, version=1, tolerance=2e-4)


@pytest.mark.parametrize(("context", "computed"), [(16, 15), (17, 16)])
def test_sampled_token_takes_the_place_of_the_last_one(context: int, computed: int) -> None:
    """An engine that samples behind each prompt computes a probe as long as the context but for its
    last token."""
    limits = ModelLimits(context_tokens=context, vocabulary=100)
    ids, probe = computed_before_a_token(PROBE, limits, version=1)
    assert probe is not None
    assert ids == probe.ids == PROBE.ids[:computed]
    assert probe.logprobs == PROBE.logprobs[: computed - 1]


def test_probe_of_a_manifest_has_the_limits_of_the_worker() -> None:
    """0 leaves the engine's own."""
    published = WeightProbe(ids=[1, 2, 3], logprobs=[-1.0, -2.0])
    for config in (
        InferenceConfig(),
        InferenceConfig(probe_error=0.3),
        InferenceConfig(probe_exact_error=0.01),
    ):
        probe = _probe_of(published, config)
        assert probe is not None
        assert (probe.most_error, probe.most_exact_error) == (
            config.probe_error,
            config.probe_exact_error,
        )
