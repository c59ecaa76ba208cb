"""The objectives, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.config import Correction, ObjectiveConfig
from forge.rl.losses import TrainedTokens
from forge.rl.losses.correction import correction_weights
from forge.rl.losses.objective import BatchSize, Objective
from forge.rl.losses.objectives import cispo_loss, clipped_loss, gspo_loss, rloo_loss
from forge.rl.losses.reference import kl_to_go
from forge.rl.losses.stats import TokenStats, policy_stats


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def tokens(
    ratios: list[float], advantages: list[float], *lengths: int, **more: Any
) -> TrainedTokens:
    """Tokens that had probability 0.1 and now have that times their ratio."""
    logprobs = (0.1 * torch.tensor(ratios, dtype=torch.float64)).log().requires_grad_()
    columns: dict[str, Any] = {
        "old": torch.full_like(logprobs, math.log(0.1)).detach(),
        "behavior": torch.full_like(logprobs, math.log(0.1)).detach(),
        "versions": torch.zeros(len(ratios), dtype=torch.int32),
        "weight_version": 0,
    }
    return TrainedTokens(
        logprobs=logprobs,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        lengths=torch.tensor(lengths or (len(ratios),)),
        entropy=torch.zeros_like(logprobs).detach(),
        **(columns | more),
    )


def gradient(loss_T: Tensor, of: TrainedTokens) -> list[float]:
    (found,) = torch.autograd.grad(loss_T.sum(), of.logprobs)
    values: list[float] = found.tolist()
    return values


def objective(*, correction: Correction | None = None, **settings: Any) -> Objective:
    return Objective(ObjectiveConfig(**settings), correction)


def evaluate(one: TrainedTokens, **settings: Any) -> float:
    size = BatchSize(tokens=len(one.logprobs), samples=len(one.lengths))
    loss = objective(**settings).evaluate(one, size).loss
    return float(loss.detach())


def test_cispo_is_the_capped_ratio_times_advantage_times_log_prob() -> None:
    """Ratios 2, 1/2 and 8 under a cap of 5: weights 2, 1/2 and 5."""
    logprobs = logs(0.4, 0.2, 0.8)
    behavior = logs(0.2, 0.4, 0.1)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = [-2 * math.log(0.4), 0.5 * 2.0 * math.log(0.2), -5 * 0.5 * math.log(0.8)]
    loss_T = cispo_loss(logprobs, behavior, advantages, ratio_cap=5.0)
    assert loss_T.tolist() == pytest.approx(expected)


def test_cispo_takes_no_gradient_through_the_ratio() -> None:
    """d loss / d log pi = -min(r, cap) * A: the capped token still learns."""
    logprobs = logs(0.4, 0.8).requires_grad_()
    advantages = torch.tensor([1.0, 1.0], dtype=torch.float64)
    cispo_loss(logprobs, logs(0.2, 0.1), advantages, ratio_cap=5.0).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -5.0])


def test_ratio_beyond_floating_point_is_the_cap() -> None:
    """exp overflows to infinity, which the cap makes finite."""
    loss = cispo_loss(
        torch.tensor([-1.0]), torch.tensor([-1000.0]), torch.tensor([1.0]), ratio_cap=5.0
    )
    assert float(loss) == 5.0


@settings(deadline=None)
@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20))
def test_on_policy_cispo_is_reinforce(values: list[float]) -> None:
    """At equal policies every weight is 1."""
    logprobs = torch.tensor(values, dtype=torch.float64)
    advantages = torch.linspace(-1, 1, len(values), dtype=torch.float64)
    loss = cispo_loss(logprobs, logprobs, advantages, ratio_cap=5.0).sum()
    assert float(loss) == pytest.approx(float(-(advantages * logprobs).sum()))


def test_clip_removes_the_gradient_beyond_its_bounds() -> None:
    """Of ratios 2, 2, 1/2, 1/2 with both signs, those that would move further out are clipped."""
    one = tokens([2.0, 2.0, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
    loss_T = clipped_loss(one, clip_low=0.2, clip_high=0.3, dual_clip=0.0)
    assert loss_T.tolist() == pytest.approx([-1.3, 2.0, -0.5, 0.8])
    assert gradient(loss_T, one) == pytest.approx([0.0, 2.0, -0.5, 0.0])


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    """A ratio of 20 counts as 3, and gives no gradient."""
    one = tokens([20.0], [-1.0])
    loss_T = clipped_loss(one, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert loss_T.tolist() == pytest.approx([3.0])
    assert gradient(loss_T, one) == [0.0]


def test_dual_clip_counts_as_clipped() -> None:
    """Every token without a gradient counts: above the dual bound for a loss, above its own bound
    for a gain."""
    one = tokens([20.0, 2.0, 20.0, 1.15, 1.15, 1.0], [-1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    size = BatchSize(tokens=1, samples=1)
    for dual, clipped in (
        (3.0, [True, False, True, False, False, False]),
        (1.1, [True, True, True, True, False, False]),
    ):
        share = objective(algorithm="dapo", dual_clip=dual).evaluate(one, size)
        assert share.clipped.tolist() == clipped
        assert [value == 0.0 for value in gradient(share.loss, one)] == clipped


def test_gspo_uses_the_geometric_mean_of_a_samples_ratios() -> None:
    """Ratios 4 and 1 make 2, clipped at 1.3 for a gain and kept for a loss; each token weighs s."""
    one = tokens([4.0, 1.0, 4.0, 1.0, 1.1], [1.0, 1.0, -1.0, -1.0, 1.0], 2, 2, 1)
    loss_T = gspo_loss(one, clip_low=0.2, clip_high=0.3)
    assert loss_T.tolist() == pytest.approx([-1.3, -1.3, 2.0, 2.0, -1.1])
    assert gradient(loss_T, one) == pytest.approx([0.0, 0.0, 2.0, 2.0, -1.1])


def test_rloo_uses_the_ratio_of_the_whole_sample() -> None:
    """Ratios 1.05 and 1.1 make 1.155; the sample's loss is the sum, its gradient R * A a token."""
    one = tokens([1.05, 1.1, 4.0, 1.0], [2.0, 2.0, 1.0, 1.0], 2, 2)
    loss_T = rloo_loss(one, clip_low=0.2, clip_high=0.2)
    assert one.sums(loss_T).tolist() == pytest.approx([-1.155 * 2, -1.2])
    assert gradient(loss_T, one) == pytest.approx([-2.31, -2.31, 0.0, 0.0])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_rloo_of_a_very_stale_sample_is_finite(advantage: float) -> None:
    """200 tokens, each e^5 times as likely as when it was sampled: the clip removes the gradient of
    a gain, and for a loss the ratio counts as e^20."""
    one = tokens([1.0] * 200, [advantage] * 200)
    stale = replace(one, old=(one.logprobs - 5).detach())
    loss_T = rloo_loss(stale, clip_low=0.2, clip_high=0.2)
    expected = -1.2 if advantage > 0 else math.exp(20)
    assert float(stale.sums(loss_T).detach()) == pytest.approx(expected)
    pull = 0.0 if advantage > 0 else math.exp(20)
    assert gradient(loss_T, stale) == pytest.approx([pull] * 200)


def test_normalizations_divide_by_tokens_samples_or_a_constant() -> None:
    """Losses -1 -1 -1 and -2 (REINFORCE at probability 1/e) over samples of 3 and 1 tokens."""
    one = replace(tokens([1.0] * 4, [1.0, 1.0, 1.0, 2.0], 3, 1), logprobs=-torch.ones(4))
    of = {"algorithm": "reinforce"}
    assert evaluate(one, **of, normalization="token") == pytest.approx(5 / 4)
    assert evaluate(one, **of, normalization="sequence") == pytest.approx((1 + 2) / 2)
    options = {"normalization": "global", "normalization_tokens": 10}
    assert evaluate(one, **of, **options) == pytest.approx(5 / 20)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
)
def test_k2_and_k3_are_added_to_the_loss(estimator: str, expected: float) -> None:
    """One token, twice as likely as under the reference, without an advantage."""
    one = tokens([2.0], [0.0], reference=logs(0.1))
    assert evaluate(one, kl_coef=0.5, kl_estimator=estimator) == pytest.approx(0.5 * expected)


def test_k1_penalty_is_subtracted_from_advantages() -> None:
    """Log-ratios ln 2 and ln 4 in one sample, ln 2 in another: to go are ln 8, ln 4 and ln 2."""
    one = tokens([2.0, 4.0, 2.0], [0.0] * 3, 2, 1, reference=logs(0.1, 0.1, 0.1))
    config = ObjectiveConfig(algorithm="reinforce", kl_coef=1.0, kl_estimator="k1")
    share = Objective(config).evaluate(one, BatchSize(tokens=1, samples=1)).loss
    expected = [math.log(8), math.log(4), math.log(2)]
    assert gradient(share, one) == pytest.approx(expected)


def test_k1_of_a_long_pass_keeps_its_digits() -> None:
    """In fp32, behind other samples whose sums are 500,000 times as large."""
    gaps = torch.cat([torch.full((100_000,), 5.0), torch.tensor([2e-3, 1e-3])])
    one = tokens([1.0] * len(gaps), [0.0] * len(gaps), 100_000, 2)
    narrow = replace(one, logprobs=gaps, reference=torch.zeros_like(gaps))
    assert kl_to_go(narrow)[-2:].tolist() == pytest.approx([3e-3, 1e-3], rel=1e-6)
    assert float(kl_to_go(narrow)[0]) == 500_000.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"teacher_coef": 1.0, "teacher_only": True}, -math.log(5)),
        ({"kl_coef": 1.0, "kl_estimator": "k1"}, math.log(2)),
        ({"kl_coef": 1.0, "kl_estimator": "k2"}, math.log(2)),
        ({"kl_coef": 1.0, "kl_estimator": "k3"}, 0.5),
    ],
)
def test_teacher_and_penalty_count_by_the_share_of_a_grammar(
    settings: Any, expected: float
) -> None:
    """A token that a grammar all but forced has a large log-prob gradient: a share of 1/4 gives a
    quarter of it, as for advantages."""
    one = tokens(
        [2.0, 2.0], [0.0, 0.0], 1, 1, reference=logs(0.1, 0.1), teacher=logs(1.0, 1.0),
        shares=torch.tensor([1.0, 0.25]),
    )  # fmt: skip
    share = objective(algorithm="reinforce", **settings).evaluate(
        one, BatchSize(tokens=1, samples=1)
    )
    assert gradient(share.loss, one) == pytest.approx([expected, expected / 4])


def test_masked_tokens_have_no_gradient_and_stay_in_the_count() -> None:
    """Masked by ratio, by staleness, or both: the other tokens weigh as before."""
    one = tokens([1.0, 8.0, 0.1], [1.0] * 3, versions=torch.tensor([9, 9, 0]), weight_version=9)
    alone = evaluate(tokens([1.0], [1.0]), algorithm="reinforce") / 3
    for correction in (
        Correction(mask_ratio_low=0.5, mask_ratio_high=2.0),
        Correction(mask_ratio_high=2.0, mask_staleness=8),
    ):
        masked = evaluate(one, algorithm="reinforce", correction=correction)
        assert masked == pytest.approx(alone)


def test_masked_infinite_loss_is_dropped() -> None:
    """0 times infinity is NaN; a mask is no factor."""
    one = tokens([1.0, 1.0], [1.0, math.inf], versions=torch.tensor([9, 0]), weight_version=9)
    loss = evaluate(one, algorithm="reinforce", correction=Correction(mask_staleness=1))
    assert loss == pytest.approx(-math.log(0.1) / 2)


@pytest.mark.parametrize("algorithm", ["cispo", "dapo", "gspo", "rloo", "reinforce"])
def test_masked_infinite_ratio_has_no_gradient(algorithm: str) -> None:
    """0 times infinity would be NaN, and the trainer would skip the step: the token's probability
    was 0 in fp64, and its advantage is infinite."""
    one = tokens([1.0, 1.0], [1.0, math.inf], 1, 1)
    far = replace(one, old=torch.tensor([math.log(0.1), -1000.0], dtype=torch.float64))
    far = replace(far, behavior=far.old)
    masks = objective(algorithm=algorithm, correction=Correction(mask_ratio_high=2.0))
    share = masks.evaluate(far, BatchSize(tokens=1, samples=1))
    assert share.masked.tolist() == [False, True]
    assert gradient(share.loss, far) == pytest.approx([-1.0, 0.0])


def test_negative_advantages_of_a_distant_sample_are_masked() -> None:
    """Mean log(mu/pi) is ln 2 in the first sample, 0 in the second; gains are kept."""
    one = tokens([0.5, 0.5, 1.0], [1.0, -1.0, -1.0], 2, 1)
    correction = Correction(mask_kl_max=0.5)
    assert correction_weights(correction, one) is not None
    assert [bool(weight) for weight in correction_weights(correction, one)] == [True, False, True]  # type: ignore[union-attr]


def test_recomputed_log_probs_move_the_ratio_into_a_capped_weight() -> None:
    """pi = pi_old, mu half and an eighth of it: REINFORCE weighed by 2 and by the cap of 4."""
    one = tokens([1.0, 1.0], [1.0, 1.0], behavior=logs(0.05, 0.0125))
    capped = objective(
        algorithm="dapo", old_logprobs="recomputed", correction=Correction(weight_cap=4.0)
    )
    share = capped.evaluate(one, BatchSize(tokens=1, samples=1)).loss
    assert gradient(share, one) == pytest.approx([-2.0, -4.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "gpro"}, "algorithm = 'gpro'.*cispo.*package.module:function"),
        ({"algorithm": "no_such_pkg:loss"}, "no_such_pkg"),
        ({"algorithm": "math:no_such"}, "no_such"),
        ({"algorithm": "math:exp", "loss_options": {"a": 1.0}}, "loss_options = {'a': 1.0}"),
        ({"loss_options": {"a": 1.0}}, "loss_options = {'a': 1.0}.*algorithm cispo"),
        ({"clip_high": 0.3}, "clip_high = 0.3.*algorithm cispo does not clip"),
        ({"algorithm": "grpo", "clip_low": 1.5}, "clip_low = 1.5.*less than 1"),
        ({"algorithm": "gspo", "dual_clip": 3.0}, "dual_clip = 3.0"),
        ({"algorithm": "grpo", "dual_clip": 0.5}, "dual_clip = 0.5.*greater than 1"),
        ({"normalization_tokens": 9}, "normalization_tokens = 9"),
        ({"ratio_cap": 0.0}, "ratio_cap = 0.0"),
        ({"correction": Correction(weight_cap=2.0)}, "weight_cap = 2.0.*count twice"),
        ({"correction": Correction(mask_ratio_high=0.5)}, "mask_ratio_high = 0.5"),
    ],
)
def test_invalid_settings_are_refused_by_name_and_value(settings: Any, message: str) -> None:
    """The message has the allowed values."""
    with pytest.raises(InvalidArgument, match=message):
        objective(**settings)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("summed", r"returned shape \(\); one loss per token is expected: \(2,\)"),
        ("number", r"returned float; a tensor of one loss per token is expected, shape \(2,\)"),
        ("misspelt", r"failed: AttributeError: .* 'logprob' \(test_rl_losses.py:\d+\)"),
        ("detached", "returned values without a gradient; compute them from tokens.logprobs"),
    ],
)
def test_custom_loss_that_fails_is_a_wrong_setting(loss: str, message: str) -> None:
    """The next batch would end the same. A sum would be normalized wrongly."""
    with pytest.raises(ConfigError, match=f"{loss}' {message}"):
        evaluate(tokens([1.0, 1.0], [1.0, 1.0]), algorithm=f"{__name__}:{loss}")


@pytest.mark.parametrize("term", ["kl_coef", "entropy_coef"])
def test_other_term_hides_no_custom_loss_without_a_gradient(term: str) -> None:
    """KL and entropy have gradients of their own."""
    one = tokens([1.0, 1.0], [1.0, 1.0], reference=logs(0.2, 0.2))
    one = replace(one, entropy=-one.logprobs)
    with pytest.raises(ConfigError, match="values without a gradient"):
        evaluate(one, algorithm=f"{__name__}:detached", kl_estimator="k3", **{term: 0.1})


def test_shortage_of_memory_in_a_custom_loss_remains_one() -> None:
    """The learner retries with smaller passes."""
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(tokens([1.0, 1.0], [1.0, 1.0]), algorithm=f"{__name__}:too_large")


def summed(of: TrainedTokens) -> Tensor:
    return -(of.logprobs * of.advantages).sum()


def number(of: TrainedTokens) -> Any:
    return float(of.advantages.sum())


def misspelt(of: Any) -> Tensor:
    loss_T: Tensor = of.logprob * of.advantages
    return loss_T


def detached(of: TrainedTokens) -> Tensor:
    return summed(of).detach().expand(of.logprobs.shape)


def too_large(of: TrainedTokens) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def stats(logprobs: Tensor, behavior: Tensor, versions: list[int], **more: Any) -> TokenStats:
    nothing = torch.zeros(len(versions))
    names = ("entropy", "reference_kl", "teacher_gaps", "clipped", "masked", "gradient_size")
    columns: dict[str, Any] = dict.fromkeys((*names, "advantages"), nothing) | {
        "lengths": torch.tensor([len(versions)]),
        "domains": ("",),
    }
    return TokenStats(
        logprobs=logprobs, behavior=behavior, versions=torch.tensor(versions), **(columns | more)
    )


def test_statistics_are_over_all_tokens_of_all_trees() -> None:
    """Two trees of one and three tokens weigh by token; the freshest tokens have their own gap."""
    one = stats(
        logs(0.8), logs(0.1), [4], entropy=torch.tensor([2.0]), clipped=torch.tensor([True])
    )
    three = stats(
        logs(0.5, 0.5, 0.5), logs(0.5, 0.5, 0.25), [7, 7, 6], entropy=torch.tensor([1.0, 1.0, 0.0]),
        clipped=torch.tensor([False] * 3),
    )  # fmt: skip
    found = policy_stats([one, three], weight_version=7)
    assert found.clip_fraction == 0.25
    assert found.entropy == 1.0
    assert found.logprob_gap_mean == pytest.approx((math.log(8) + math.log(2)) / 4, rel=1e-6)
    assert found.logprob_gap_p99 == pytest.approx(math.log(8), rel=1e-6)
    assert found.inference_gap_mean == pytest.approx(0.0, abs=1e-6)
    assert found.inference_gap_staleness == 0.0
    assert (found.staleness_mean, found.staleness_max) == (1.0, 3.0)
    assert {version: gap.tokens for version, gap in found.gaps.items()} == {4: 1, 6: 1, 7: 2}
    assert found.gaps[4].gap_sum == pytest.approx(math.log(8), rel=1e-6)
    assert found.gaps[7].gap_sum == pytest.approx(0.0, abs=1e-6)


def test_statistics_of_an_empty_batch_are_zero() -> None:
    """Not NaN."""
    found = policy_stats([], weight_version=7)
    assert found.entropy == found.logprob_gap_p99 == found.staleness_max == 0.0
