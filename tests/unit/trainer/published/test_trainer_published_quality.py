"""The comparison of a canary with its base, from what was trained."""

from __future__ import annotations

import math

import pytest
from prometheus_client import REGISTRY

from forge.rl.losses.stats import VersionGap
from forge.runtime.weights import WeightAnnouncement, WeightHold
from services.trainer import metrics
from services.trainer.published.canary_rules import CanaryVerdict, judge
from services.trainer.published.quality import Qualities, Quality
from services.trainer.published.versions import PublishedVersions
from services.trainer.setting_tables import CanarySettings


def announcement(version: int) -> WeightAnnouncement:
    return WeightAnnouncement(
        weight_version=version, total_bytes=0, digest="", source="", manifest="m"
    )


def test_quality_is_summed_over_batches() -> None:
    """Rewards over trajectories, gaps over tokens; old versions are forgotten."""
    qualities = Qualities()
    qualities.add({7: [1.0, 0.0]}, {7: VersionGap(tokens=3, gap_sum=0.3)})
    qualities.add({7: [1.0, 1.0]}, {7: VersionGap(tokens=1, gap_sum=0.5)})
    assert qualities.of(7).mean_reward == 0.75
    assert qualities.of(7).logprob_gap == pytest.approx(0.2)
    assert math.isnan(qualities.of(8).mean_reward) and math.isnan(qualities.of(8).logprob_gap)
    qualities.add({version: [0.0] for version in range(8, 300)}, {})
    assert qualities.of(7).trajectories == 0 and qualities.of(299).trajectories == 1


def test_metrics_show_base_and_canary() -> None:
    """By role, not by version, so that their number is bounded; NaN without a hold."""
    versions = PublishedVersions(kept=2)
    versions.qualities.add({7: [0.5], 9: [1.0, 0.0, 1.0, 1.0]}, {})
    metrics.follow_qualities(versions.quality_of)

    def shown(name: str, role: str) -> float:
        value = REGISTRY.get_sample_value(f"forge_trainer_version_{name}", {"weights": role})
        assert value is not None
        return float(value)

    assert math.isnan(shown("mean_reward", "base")) and shown("trajectories", "base") == 0
    versions.hold = WeightHold(base=announcement(7), canary=announcement(9))
    assert (shown("mean_reward", "base"), shown("mean_reward", "canary")) == (0.5, 0.75)
    assert (shown("trajectories", "base"), shown("trajectories", "canary")) == (1, 4)


@pytest.mark.parametrize(
    ("canary", "broken", "refused", "verdict"),
    [
        ((4, 3.0, 10, 1.0), 0, "", CanaryVerdict.PROMOTE),
        ((3, 3.0, 10, 1.0), 0, "", CanaryVerdict.WAIT),
        ((4, 3.0, 0, 0.0), 0, "", CanaryVerdict.WAIT),
        ((4, 3.0, 10, 2.1), 0, "", CanaryVerdict.ROLL_BACK),
        ((4, 3.0, 10, math.nan), 0, "", CanaryVerdict.ROLL_BACK),
        ((4, 2.0, 10, 1.0), 0, "", CanaryVerdict.ROLL_BACK),
        ((0, 0.0, 0, 0.0), 1, "", CanaryVerdict.ROLL_BACK),
        ((0, 0.0, 0, 0.0), 0, "shapes differ", CanaryVerdict.ROLL_BACK),
    ],
)
def test_canary_is_judged_by_its_trajectories_gap_and_reward(
    canary: tuple[int, float, int, float], broken: int, refused: str, verdict: CanaryVerdict
) -> None:
    """Against bounds of .2 and a base of mean reward .75. Groups that are dropped as flat have
    trajectories and no trained token: without a gap, which is NaN, nothing is decided."""
    trajectories, reward_sum, tokens, gap_sum = canary
    found = judge(
        CanarySettings(trajectories=4),
        canary=Quality(
            trajectories=trajectories, reward_sum=reward_sum, tokens=tokens, gap_sum=gap_sum
        ),
        base=Quality(trajectories=4, reward_sum=3.0, tokens=8, gap_sum=0.1),
        broken=broken,
        refused=refused,
        age_s=0.0,
    )
    assert found.outcome == verdict


@pytest.mark.parametrize(
    ("limit_s", "age_s", "verdict"),
    [
        (60.0, 60.0, CanaryVerdict.WAIT),
        (60.0, 61.0, CanaryVerdict.ROLL_BACK),
        (0.0, 1e9, CanaryVerdict.WAIT),
    ],
)
def test_canary_with_few_trajectories_has_a_time_limit(
    limit_s: float, age_s: float, verdict: CanaryVerdict
) -> None:
    """The reason has the counts: they show which side sampled too little. 0 is no limit."""
    found = judge(
        CanarySettings(trajectories=4, max_wait_s=limit_s),
        canary=Quality(trajectories=1, reward_sum=1.0, tokens=2, gap_sum=0.1),
        base=Quality(trajectories=9, reward_sum=3.0, tokens=8, gap_sum=0.1),
        broken=0,
        refused="",
        age_s=age_s,
    )
    assert found.outcome == verdict
    if verdict is CanaryVerdict.ROLL_BACK:
        assert found.reason == (
            "no judgement within 60 s: the canary has 1 trajectories and 2 trained tokens, the "
            "base 9 trajectories, needed are 4"
        )
