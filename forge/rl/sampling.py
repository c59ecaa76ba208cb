"""Samples token ids from logits, with the exact log-probability of each in its distribution.

Randomness is counter-based: the draw at a position depends on the row's seed and the position
alone. So a row's tokens do not depend on the other rows of its batch, and a worker that takes over
a request continues with the same draws.

Shape suffixes: B rows, V vocabulary, K a block of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_NUCLEUS_GUESS = 256
"""Most nuclei are within this number of likeliest tokens, which saves the full sort."""
_CDF_BLOCK = 256


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


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """One number in [0, 1) per row, a function of (seed, position): two rounds of splitmix64."""
    state = np.asarray(seeds, dtype=np.uint64)
    counter = np.asarray(positions, dtype=np.uint64)
    # The mixing relies on the wrap-around of uint64.
    mixed = _mix(_mix(state + _GOLDEN) + counter * _GOLDEN)
    return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))


def sample(
    logits_BV: torch.Tensor,
    *,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor,
    top_k_B: torch.Tensor,
    uniform_B: torch.Tensor,
    min_p_B: torch.Tensor | None = None,
    keep_all: bool = False,
) -> SampledBatch:
    """One token per row, by inverting the cumulative distribution at `uniform_B`.

    Order of the cuts: temperature, min-p, top-k (0 keeps all), then top-p on what is left,
    renormalized. Temperature 0 takes the likeliest token. Ties at a cut are kept. `keep_all`
    returns the whole distribution, too.
    """
    logits_BV = logits_BV.float()
    greedy_B = temperature_B <= 0
    if not keep_all and bool(greedy_B.all()):
        likeliest = logits_BV.max(-1)
        # Not a constant zero: a logit that is not finite must stay so, to reveal broken weights.
        return SampledBatch(ids=likeliest.indices, logprobs=likeliest.values * 0.0)
    if bool((temperature_B != 1).any()):
        logits_BV = logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    whole_BV = logits_BV
    if min_p_B is not None:
        logits_BV = _cut_min_p(logits_BV, min_p_B)
    logits_BV = _cut_top_k(logits_BV, top_k_B)
    logits_BV = _cut_top_p(logits_BV, top_p_B)
    logprobs_BV = logits_BV.log_softmax(-1)
    ids_B = _invert_cdf(logprobs_BV.exp(), uniform_B)
    logprobs_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    if bool(greedy_B.any()):
        ids_B = torch.where(greedy_B, logits_BV.argmax(-1), ids_B)
        logprobs_B = torch.where(greedy_B, logits_BV.amax(-1) * 0.0, logprobs_B)
    return SampledBatch(
        ids=ids_B,
        logprobs=logprobs_B,
        kept_logprobs=None if logits_BV is whole_BV else _kept(whole_BV, logits_BV, greedy_B),
        all_logprobs=logprobs_BV if keep_all else None,
    )


def _kept(whole_BV: torch.Tensor, cut_BV: torch.Tensor, greedy_B: torch.Tensor) -> torch.Tensor:
    """The log of the share of probability that the cuts kept, clamped to at most 0."""
    kept_B = (cut_BV.logsumexp(-1) - whole_BV.logsumexp(-1)).clamp(max=0)
    return torch.where(greedy_B, 0.0, kept_B)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


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


def _invert_cdf(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds `uniform_B` times the row's sum.

    Two levels, blocks and then the tokens of one block: a cumulative sum over the vocabulary costs
    more than the softmax.
    """
    rows, vocabulary = probs_BV.shape
    padded = -(-vocabulary // _CDF_BLOCK) * _CDF_BLOCK
    if padded != vocabulary:
        probs_BV = torch.nn.functional.pad(probs_BV, (0, padded - vocabulary))
    blocks = probs_BV.view(rows, -1, _CDF_BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target_B = uniform_B.double() * ends[:, -1]
    block_B = _first_above(ends, target_B)
    block_BK = blocks[torch.arange(rows, device=blocks.device), block_B].double()
    start_B = ends.gather(1, block_B[:, None])[:, 0] - block_BK.sum(-1)
    token_B = _first_above(block_BK.cumsum(-1), target_B - start_B)
    return (block_B * _CDF_BLOCK + token_B).clamp(max=vocabulary - 1)


def _first_above(ends_BK: torch.Tensor, target_B: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative sum above the target, never of a token without probability."""
    # NaN sorts above every number: the clamp keeps its index inside the row.
    first_B = torch.searchsorted(ends_BK, target_B[:, None], right=True)[:, 0]
    # The last token with probability: the cumulative sum is constant after it.
    last_B = torch.searchsorted(ends_BK, ends_BK[:, -1:].contiguous())[:, 0]
    return torch.minimum(first_B, last_B).clamp(max=ends_BK.shape[-1] - 1)
