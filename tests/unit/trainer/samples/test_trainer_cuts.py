"""Turns sampled with top_k or top_p: corrected, or left out and counted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forge.core.credit.rewards import RewardWeights
from forge.core.token_columns import float32_array, float32_bytes, int32_bytes
from forge.v1 import common_pb2 as pb
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.samples import BatchSamples, build_samples

RULES = CreditRules(weights=RewardWeights(alpha=0.0, beta=0.0, gamma=1.0))


WHOLE: Any = {"top_p": 1.0, "top_k": 0}


def built(allowed: list[float], *, later: Any = (), **settings: Any) -> BatchSamples:
    """A group of two rollouts of one turn of two tokens, and of `later` turns like it."""
    turn = pb.Turn(
        parent_turn=-1,
        prompt_ids=int32_bytes([1]),
        sampled=pb.SampledTokens(
            ids=int32_bytes([2, 3]),
            logprobs=float32_bytes([-0.5, -1.0]),
            weight_versions=int32_bytes([1, 1]),
            allowed_logprobs=float32_bytes(allowed),
        ),
        **({"temperature": 1.0, "finish_reason": pb.FINISH_REASON_STOP} | settings),
    )
    turns = [turn]
    for changes in later:
        turns.append(pb.Turn())
        turns[-1].CopyFrom(turn)
        turns[-1].MergeFrom(pb.Turn(turn_index=len(turns) - 1, **changes))
    reward = pb.RewardEvent(event_id="r", kind=pb.REWARD_KIND_OUTCOME, value=1, turn_index=-1)
    return build_samples(
        [
            [
                pb.Trajectory(trajectory_id="t:0:0", domain="code", turns=turns, rewards=[reward]),
                pb.Trajectory(trajectory_id="t:0:1", domain="code", turns=turns),
            ]
        ],
        RULES,
    )


@pytest.mark.parametrize("cut", [{"top_p": 0.5, "top_k": 0}, {"top_p": 1.0, "top_k": 3}])
def test_sampling_cut_with_a_recorded_share_is_corrected(cut: dict[str, Any]) -> None:
    """Behavior log-probs are those of the whole distribution, and advantages weigh the share."""
    batch = built([-0.25, 0.0], **cut)
    assert dict(batch.cuts) == {"corrected": 2}
    sample, _ = batch.samples
    assert float32_array(sample.behavior_logprobs).tolist() == [-0.75, -1.0]
    first, second = float32_array(sample.advantages)
    assert 0 < first < second


@pytest.mark.parametrize("allowed", [[], [-0.25]])
def test_turn_with_a_cut_without_its_share_is_left_out(allowed: list[float]) -> None:
    """And counted. An engine that does not send it, or only for some tokens, costs the turn and
    neither the trajectory nor its rewards."""
    batch = built(allowed, top_p=0.5, top_k=0)
    assert batch.samples == () and dict(batch.cuts) == {"share_missing": 2}
    assert (batch.excluded, batch.trajectories) == (0, 2)


def test_turn_without_a_cut_is_unchanged() -> None:
    """Settings that keep every token change nothing."""
    batch = built([], top_p=1.0, top_k=0)
    assert dict(batch.cuts) == {"none": 2}
    assert float32_array(batch.samples[0].behavior_logprobs).tolist() == [-0.5, -1.0]


def test_turn_without_recorded_cuts_is_trained_and_counted() -> None:
    """Earlier versions did not record cuts."""
    batch = built([])
    assert dict(batch.cuts) == {"unknown": 2} and len(batch.samples) == 2


def test_a_domain_of_greedy_turns_is_untrained() -> None:
    """Greedy turns have no distribution to train; a domain without other turns is reported."""
    batch = built([], temperature=0.0, top_p=0.5)
    assert (batch.samples, dict(batch.cuts)) == ((), {})
    assert dict(batch.left_out) == {("code", "greedy"): 2}
    assert batch.untrained_domains == ("code",)


def test_a_domain_with_a_trained_turn_is_not_untrained() -> None:
    """Turns of aborted answers are left out and counted beside it."""
    batch = built([], **WHOLE, later=[{"finish_reason": pb.FINISH_REASON_ABORTED}])
    assert len(batch.samples) == 2
    assert dict(batch.left_out) == {("code", "aborted"): 2}
    assert batch.untrained_domains == ()


@pytest.mark.parametrize("share", [math.nan, math.inf, -math.inf])
def test_turn_of_an_engine_that_computes_no_shares_is_left_out(share: float) -> None:
    """A grammar or min_tokens alone: the turn has no setting that tells of it. A share that is not
    finite would make the whole step's gradient NaN."""
    batch = built([-0.5, share], **WHOLE)
    assert dict(batch.cuts) == {"share_missing": 2}
    assert dict(batch.left_out) == {("code", "share_missing"): 2}
