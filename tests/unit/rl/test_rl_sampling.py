"""Drawing tokens: the distribution, its cuts, the log-probs and the random stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forge.rl.sampling import (
    SampledBatch,
    TokenSubset,
    device_race_noise,
    race_noise,
    sample,
    sample_uncut,
)


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seeds: Any = None,
) -> SampledBatch:
    rows = len(logits)
    return sample(
        logits,
        temperature_B=torch.full((rows,), temperature),
        top_p_B=torch.full((rows,), top_p),
        top_k_B=torch.full((rows,), top_k),
        noise_BN=race_noise(seeds or range(rows), [0] * rows, vocabulary=logits.shape[-1]),
    )


def kept_by_definition(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution after the cuts, written down naively for one row."""
    order = logits.argsort(descending=True)
    if top_k:
        order = order[:top_k]
    probs = logits[order].softmax(-1)
    before = probs.cumsum(-1) - probs
    order = order[before < top_p]
    kept = torch.full_like(logits, -torch.inf)
    kept[order] = logits[order]
    return kept.log_softmax(-1)


@pytest.mark.parametrize(("vocabulary", "draws"), [(5, 40_000), (256, 40_000), (1000, 10_000)])
def test_sampled_frequencies_equal_the_probabilities(vocabulary: int, draws: int) -> None:
    """Within 5 sigma for each token."""
    torch.manual_seed(0)
    logits = torch.randn(vocabulary) * 2
    drawn = draw(logits.expand(draws, -1))
    counts = torch.bincount(drawn.ids, minlength=vocabulary)
    expected = logits.softmax(-1) * draws
    sigma = expected.sqrt().clamp(min=1)
    assert ((counts - expected).abs() < 5 * sigma).all()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.3), (7, 1.0), (7, 0.8), (1, 1.0)])
def test_cuts_keep_the_tokens_of_their_definition(top_k: int, top_p: float) -> None:
    """Only tokens within the cuts are drawn, with the renormalised log-prob; V over the guess."""
    torch.manual_seed(1)
    logits = torch.randn(700)
    expected = kept_by_definition(logits, top_k, top_p)
    drawn = draw(logits.expand(3000, -1), top_k=top_k, top_p=top_p)
    assert torch.allclose(drawn.logprobs, expected[drawn.ids], atol=1e-5)
    assert drawn.logprobs.isfinite().all()


def test_min_p_keeps_tokens_near_the_likeliest() -> None:
    """Those with at least this share of its probability, in a row with the cut alone; the share of
    probability that was kept is returned."""
    torch.manual_seed(3)
    logits = torch.randn(700) * 2
    probs = logits.softmax(-1)
    kept = probs >= 0.2 * probs.max()
    drawn = sample(
        logits.expand(2000, -1),
        temperature_B=torch.ones(2000),
        top_p_B=torch.ones(2000),
        top_k_B=torch.zeros(2000, dtype=torch.long),
        noise_BN=race_noise(range(2000), [0] * 2000, vocabulary=700),
        min_p_B=torch.tensor([0.2, 0.0]).repeat(1000),
    )
    assert kept[drawn.ids[::2]].all()
    assert not kept[drawn.ids[1::2]].all()
    assert drawn.kept_logprobs is not None
    assert torch.allclose(drawn.kept_logprobs[::2], probs[kept].sum().log(), atol=1e-5)
    assert (drawn.kept_logprobs[1::2] == 0).all()
    expected = (probs / probs[kept].sum()).log()
    assert torch.allclose(drawn.logprobs[::2], expected[drawn.ids[::2]], atol=1e-5)


def test_rows_keep_their_own_settings() -> None:
    """Greedy, cut and free rows of one batch do not affect each other."""
    torch.manual_seed(2)
    logits = torch.randn(3, 50)
    drawn = sample(
        logits,
        temperature_B=torch.tensor([0.0, 0.5, 1.0]),
        top_p_B=torch.tensor([1.0, 0.6, 1.0]),
        top_k_B=torch.tensor([0, 10, 0]),
        noise_BN=race_noise([1, 2, 3], [0, 0, 0], vocabulary=50),
    )
    assert drawn.ids[0] == logits[0].argmax()
    assert drawn.logprobs[0] == 0
    cut = kept_by_definition(logits[1] / 0.5, 10, 0.6)
    assert drawn.logprobs[1] == pytest.approx(cut[drawn.ids[1]].item(), abs=1e-5)
    free = logits[2].log_softmax(-1)
    assert drawn.logprobs[2] == pytest.approx(free[drawn.ids[2]].item(), abs=1e-6)


def test_greedy_row_takes_the_likeliest_token_with_log_prob_zero() -> None:
    """At temperature 0 nothing else could have been drawn."""
    logits = torch.randn(8, 30)
    drawn = draw(logits, temperature=0)
    assert torch.equal(drawn.ids, logits.argmax(-1))
    assert (drawn.logprobs == 0).all()


def test_impossible_tokens_are_never_drawn() -> None:
    """Tokens of probability zero at either end and in between, whatever their noise is."""
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [3, 301, 302]] = 0.0
    drawn = draw(logits.expand(2000, -1))
    assert set(drawn.ids.tolist()) == {3, 301, 302}
    assert drawn.logprobs.isfinite().all()


def test_nan_logits_give_no_finite_log_prob() -> None:
    """Greedy or not, so the caller can detect them."""
    logits = torch.full((2, 10), torch.nan)
    drawn = sample(
        logits,
        temperature_B=torch.tensor([0.0, 1.0]),
        top_p_B=torch.ones(2),
        top_k_B=torch.zeros(2),
        noise_BN=race_noise([1, 2], [0, 0], vocabulary=10),
    )
    assert not drawn.logprobs.isfinite().any()


@pytest.mark.parametrize(("vocabulary", "change"), [(5, 2.0), (1000, 0.3)])
def test_similar_distributions_draw_the_same_token(vocabulary: int, change: float) -> None:
    """With the same noise, in at least (1 - tv) / (1 + tv) of all draws less a little for the
    second race; independent draws would agree far less often."""
    torch.manual_seed(4)
    logits = torch.randn(vocabulary) * 2
    other = logits + change * torch.randn(vocabulary)
    p, q = logits.softmax(-1), other.softmax(-1)
    variation = float((p - q).abs().sum() / 2)
    rows = 20_000
    ids, others = (draw(one.expand(rows, -1)).ids for one in (logits, other))
    agreed = float((ids == others).float().mean())
    assert 0.02 < variation < 0.5
    assert agreed > (1 - variation) / (1 + variation) - 0.02
    assert agreed > float((p * q).sum()) + 0.1


def test_noise_depends_on_seed_and_position_alone() -> None:
    """The same pair gives the same noise in any batch; another pair gives another one."""
    alone = race_noise([7], [12], vocabulary=600)
    among = race_noise([1, 7, 2**64 - 1], [3, 12, 12], vocabulary=600)
    assert torch.equal(among[1], alone[0])
    assert len({*race_noise([7, 7, 8], [12, 13, 12], vocabulary=600)[:, 0].tolist()}) == 3


@pytest.mark.parametrize("place", [0, 2, 200])
def test_noise_is_exponential_and_uncorrelated(place: int) -> None:
    """Over consecutive positions and over consecutive seeds, and between the places of a row."""
    count = 20_000
    for seeds, positions in (([5] * count, range(count)), (range(count), [5] * count)):
        noise = race_noise(list(seeds), list(positions), vocabulary=600).numpy()
        numbers = np.exp(-noise[:, place])
        assert noise.min() > 0
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert abs(counts - 1000).max() < 5 * np.sqrt(1000)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
        assert abs(np.corrcoef(numbers, np.exp(-noise[:, place + 1]))[0, 1]) < 0.03


def test_noise_on_a_device_is_that_of_the_host() -> None:
    """Whatever the seed's highest bit; up to the last bit of the logarithm."""
    rng = np.random.default_rng(0)
    seeds = [0, 2**63, 2**64 - 1, *map(int, rng.integers(0, 2**64, 60, dtype=np.uint64))]
    positions = list(range(len(seeds)))
    host = race_noise(seeds, positions, vocabulary=1000)
    signed = torch.from_numpy(np.asarray(seeds, dtype=np.uint64).astype(np.int64))
    device = device_race_noise(signed, torch.tensor(positions), vocabulary=1000)
    assert torch.allclose(device, host, rtol=1e-14, atol=0)


def test_sampling_without_cuts_is_that_with_all_of_them_off() -> None:
    """Tokens and log-probs, of greedy rows and of others."""
    logits = torch.randn(50, 700, generator=torch.Generator().manual_seed(1)) * 3
    heat = torch.linspace(0, 2, 50)
    noise = race_noise(range(50), [0] * 50, vocabulary=700)
    expected = sample(logits, temperature_B=heat, noise_BN=noise)
    ids, logprobs = sample_uncut(logits, temperature_B=heat, noise_BN=noise)
    assert torch.equal(ids, expected.ids)
    assert torch.equal(logprobs, expected.logprobs)


def test_draw_among_some_tokens_is_that_without_all_others() -> None:
    """The same noise for each token, so the same token: greedy, at temperatures and with cuts."""
    torch.manual_seed(0)
    vocabulary = 3000
    settings: dict[str, Any] = {
        "temperature_B": torch.tensor([1.0, 0.7, 0.0, 1.2]),
        "top_k_B": torch.tensor([0, 5, 0, 9]),
        "top_p_B": torch.tensor([1.0, 0.9, 1.0, 0.5]),
        "min_p_B": torch.tensor([0.0, 0.0, 0.0, 0.1]),
    }
    for trial in range(50):
        tokens_S = torch.randperm(vocabulary)[:300].sort().values
        among = TokenSubset(tokens_S, vocabulary=vocabulary)
        logits_BS = torch.randn(4, 300) * 3
        noise_BN = race_noise([trial] * 4, range(4), vocabulary=vocabulary)
        drawn = sample(logits_BS, noise_BN=noise_BN, among=among, **settings)
        expected = sample(among.spread(logits_BS), noise_BN=noise_BN, **settings)
        assert drawn.ids.tolist() == expected.ids.tolist()
        assert torch.allclose(drawn.logprobs, expected.logprobs, atol=1e-5)
