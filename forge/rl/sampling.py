"""Samples token ids from logits, with the exact log-probability of each in its distribution.

Randomness is counter-based: the noise at a position depends on the row's seed and the position
alone. So a row's tokens do not depend on the other rows of its batch, and a worker that takes over
a request continues with the same draws.

A draw is a race: each event has an exponential time, its noise over its probability, and the
earliest wins; that is a draw from the distribution. Two similar distributions with the same noise
mostly draw the same token, at least in (1 - tv) / (1 + tv) of all draws with one race, where tv is
their total variation (arXiv 2408.07978). So a draft head's draw with the noise of a position
foretells the policy's. There are two races, of the blocks of the vocabulary and of the tokens of
the winning block: one noise per token would cost more than the softmax.

Shape suffixes: B rows, V vocabulary, K tokens of a block of the vocabulary, N noise of a row, S
tokens of a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_NUCLEUS_GUESS = 256
"""Most nuclei are within this number of likeliest tokens, which saves the full sort."""
_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """One sampled token per row."""

    ids: torch.Tensor
    """int64, shape [B]."""
    logprobs: torch.Tensor
    """float32 natural log, shape [B]; 0 for greedy rows. Not finite where the logits are not."""
    kept_logprobs: torch.Tensor | None = None
    """float32, shape [B]: natural log of the share of probability that the cuts kept; 0 for rows
    without a cut and greedy rows. None when no row has a cut."""
    all_logprobs: torch.Tensor | None = None
    """float32, shape [B, V]: the whole distribution, if requested; for greedy rows that at
    temperature 1, with their other cuts."""


class TokenSubset:
    """A part of a vocabulary; a draw in it uses the noise of each token in the whole."""

    def __init__(self, tokens_S: torch.Tensor, *, vocabulary: int) -> None:
        """`tokens_S`: different token ids."""
        self.tokens_S = tokens_S
        self.vocabulary = vocabulary
        self._blocks_S = tokens_S // _BLOCK
        self._places_S = tokens_S % _BLOCK

    def __len__(self) -> int:
        return len(self.tokens_S)

    def spread(self, logits_BS: torch.Tensor) -> torch.Tensor:
        """[B, V]: the logits of these tokens, minus infinity for all others."""
        logits_BV = logits_BS.new_full((len(logits_BS), self.vocabulary), -torch.inf)
        return logits_BV.index_copy_(1, self.tokens_S, logits_BS)

    def race(self, probs_BS: torch.Tensor, noise_BN: torch.Tensor) -> torch.Tensor:
        """[B] indices in `tokens_S`: `_race` over the whole vocabulary, where all other tokens have
        no probability."""
        wide_BS = probs_BS.double()
        count = noise_BN.shape[-1] - _BLOCK
        sums = wide_BS.new_zeros(len(wide_BS), count).index_add_(1, self._blocks_S, wide_BS)
        block_B = (sums / noise_BN[:, :count]).argmax(-1)
        times_BS = wide_BS / noise_BN[:, count + self._places_S]
        return times_BS.masked_fill_(self._blocks_S != block_B[:, None], -1.0).argmax(-1)


def race_noise(
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    vocabulary: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Exponential noise per row for `sample`, float64 [B, N], all above 0: a function of (seed,
    position) alone. `device`: where it is computed; None: on the CPU."""
    state = np.asarray(seeds, dtype=np.uint64)
    if device is not None and device.type != "cpu":
        seeds_B = torch.from_numpy(state.view(np.int64)).to(device)
        positions_B = torch.tensor(positions, device=device)
        return device_race_noise(seeds_B, positions_B, vocabulary=vocabulary)
    counter = np.asarray(positions, dtype=np.uint64)
    count = -(-vocabulary // _BLOCK) + _BLOCK
    # Three rounds of splitmix64.
    mixed_B = mixed(mixed(state + GOLDEN) + counter * GOLDEN)
    numbers_N = np.arange(1, count + 1, dtype=np.uint64)
    mixed_BN = mixed(mixed_B[:, None] + numbers_N * GOLDEN)
    uniform_BN = (mixed_BN >> np.uint64(11)).astype(np.float64) * 2.0**-53
    # Between 0 and 1, both excluded: a noise of 0 would win for a token without probability.
    return torch.from_numpy(-np.log1p(-(uniform_BN + 2.0**-54)))


def device_race_noise(
    seeds_B: torch.Tensor, positions_B: torch.Tensor, *, vocabulary: int
) -> torch.Tensor:
    """`race_noise` on the device of its int64 arguments, seeds modulo 2^64; equal up to the last
    bit of the logarithm."""
    count = -(-vocabulary // _BLOCK) + _BLOCK
    golden = _signed(GOLDEN)
    mixed_B = _device_mix(_device_mix(seeds_B + golden) + positions_B * golden)
    numbers_N = torch.arange(1, count + 1, device=seeds_B.device)
    mixed_BN = _device_mix(mixed_B[:, None] + numbers_N * golden)
    uniform_BN = _shifted(mixed_BN, 11).double() * 2.0**-53
    return -torch.log1p(-(uniform_BN + 2.0**-54))


def sample_uncut(
    logits_BV: torch.Tensor, *, temperature_B: torch.Tensor, noise_BN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] and log-probs [B] of `sample` without cuts, without a wait for the device."""
    logits_BV = logits_BV.float()
    greedy_B = temperature_B <= 0
    heated_BV = logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_BV = heated_BV.log_softmax(-1)
    ids_B = _race(logprobs_BV.exp(), noise_BN)
    logprobs_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    best = logits_BV.max(-1)
    ids_B = torch.where(greedy_B, best.indices, ids_B)
    return ids_B, torch.where(greedy_B, best.values * 0.0, logprobs_B)


def sample(
    logits_BV: torch.Tensor,
    *,
    temperature_B: torch.Tensor,
    noise_BN: torch.Tensor,
    top_p_B: torch.Tensor | None = None,
    top_k_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
    keep_all: bool = False,
    among: TokenSubset | None = None,
) -> SampledBatch:
    """One token per row, by the races of `noise_BN`, from `race_noise`. `among`: the logits are
    those of these tokens alone, [B, S], and so is the whole distribution.

    Order of the cuts: temperature, min-p, top-k (0 keeps all), then top-p on what is left,
    renormalized; None cuts nothing. Temperature 0 takes the likeliest token. Ties at a cut are
    kept. `keep_all` returns the whole distribution, too.
    """
    logits_BV = logits_BV.float()
    greedy_B = temperature_B <= 0
    if not keep_all and bool(greedy_B.all()):
        likeliest = logits_BV.max(-1)
        # Not a constant zero: a logit that is not finite must stay so, to reveal broken weights.
        return SampledBatch(ids=_tokens(likeliest.indices, among), logprobs=likeliest.values * 0.0)
    if bool((temperature_B != 1).any()):
        logits_BV = logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    whole_BV = logits_BV
    if min_p_B is not None:
        logits_BV = _cut_min_p(logits_BV, min_p_B)
    if top_k_B is not None:
        logits_BV = _cut_top_k(logits_BV, top_k_B)
    if top_p_B is not None:
        logits_BV = _cut_top_p(logits_BV, top_p_B)
    logprobs_BV = logits_BV.log_softmax(-1)
    race = _race if among is None else among.race
    ids_B = race(logprobs_BV.exp(), noise_BN)
    logprobs_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    if bool(greedy_B.any()):
        ids_B = torch.where(greedy_B, logits_BV.argmax(-1), ids_B)
        logprobs_B = torch.where(greedy_B, logits_BV.amax(-1) * 0.0, logprobs_B)
    return SampledBatch(
        ids=_tokens(ids_B, among),
        logprobs=logprobs_B,
        kept_logprobs=None if logits_BV is whole_BV else _kept(whole_BV, logits_BV, greedy_B),
        all_logprobs=logprobs_BV if keep_all else None,
    )


def _tokens(indices_B: torch.Tensor, among: TokenSubset | None) -> torch.Tensor:
    """The tokens at these places of the logits."""
    return indices_B if among is None else among.tokens_S[indices_B]


def _kept(whole_BV: torch.Tensor, cut_BV: torch.Tensor, greedy_B: torch.Tensor) -> torch.Tensor:
    """The log of the share of probability that the cuts kept, clamped to at most 0."""
    kept_B = (cut_BV.logsumexp(-1) - whole_BV.logsumexp(-1)).clamp(max=0)
    return torch.where(greedy_B, 0.0, kept_B)


def mixed(state: np.ndarray) -> np.ndarray:
    """The mixing step of splitmix64 for each uint64, which relies on their wrap-around."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    last: np.ndarray = state ^ (state >> np.uint64(31))
    return last


def _signed(number: np.uint64) -> int:
    """The int64 with the same bits."""
    return int(number.astype(np.int64))


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right that brings in zeros."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _device_mix(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shifted(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shifted(state, 27)) * _signed(_MIX_2)
    return state ^ _shifted(state, 31)


def _cut_min_p(logits_BV: torch.Tensor, min_p_B: torch.Tensor) -> torch.Tensor:
    if not bool((min_p_B > 0).any()):
        return logits_BV
    # log 0 keeps all.
    floor_B = logits_BV.amax(-1) + min_p_B.float().log()
    return logits_BV.masked_fill(logits_BV < floor_B[:, None], -torch.inf)


def _cut_top_k(logits_BV: torch.Tensor, top_k_B: torch.Tensor) -> torch.Tensor:
    vocabulary = logits_BV.shape[-1]
    limited_B = (top_k_B > 0) & (top_k_B < vocabulary)
    if not bool(limited_B.any()):
        return logits_BV
    widest = int(top_k_B[limited_B].max())
    top_BK = logits_BV.topk(widest, dim=-1).values
    last_B = (top_k_B.clamp(1, widest) - 1).long()
    floor_B = top_BK.gather(1, last_B[:, None])[:, 0]
    floor_B = torch.where(limited_B, floor_B, -torch.inf)
    return logits_BV.masked_fill(logits_BV < floor_B[:, None], -torch.inf)


def _cut_top_p(logits_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    rows = (top_p_B < 1).nonzero()[:, 0]
    if len(rows) == 0:
        return logits_BV
    probs_BV = logits_BV[rows].softmax(-1)
    mass_B = top_p_B[rows]
    guess = min(_NUCLEUS_GUESS, probs_BV.shape[-1])
    sorted_BK = probs_BV.topk(guess, dim=-1).values
    if bool((sorted_BK.sum(-1) < mass_B).any()):
        sorted_BK = probs_BV.sort(dim=-1, descending=True).values
    # A token is kept if the likelier tokens do not fill the nucleus.
    before_BK = sorted_BK.cumsum(-1) - sorted_BK
    kept_B = (before_BK < mass_B[:, None]).sum(-1).clamp(min=1)
    floor_B = sorted_BK.gather(1, kept_B[:, None] - 1)
    cut_BV = logits_BV.clone()
    cut_BV[rows] = logits_BV[rows].masked_fill(probs_BV < floor_B, -torch.inf)
    return cut_BV


def _race(probs_BV: torch.Tensor, noise_BN: torch.Tensor) -> torch.Tensor:
    """The winning token of the winning block, never one without probability."""
    rows, vocabulary = probs_BV.shape
    count = noise_BN.shape[-1] - _BLOCK
    padding = count * _BLOCK - vocabulary
    if padding:
        probs_BV = torch.nn.functional.pad(probs_BV, (0, padding))
    blocks = probs_BV.view(rows, count, _BLOCK)
    block_B = (blocks.sum(-1, dtype=torch.float64) / noise_BN[:, :count]).argmax(-1)
    block_BK = blocks[torch.arange(rows, device=blocks.device), block_B]
    token_B = (block_BK.double() / noise_BN[:, count:]).argmax(-1)
    # Logits that are not finite may choose a token of the padding.
    return (block_B * _BLOCK + token_B).clamp(max=vocabulary - 1)
