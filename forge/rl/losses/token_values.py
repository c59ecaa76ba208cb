"""Values of single tokens of a step, for viewers.

Owns their selection from the statistics of a step and their form in host memory: one copy from the
device, after the step. They are of the first pass over the batch, before the update of their
mini-batch. A token that several samples share has values in each of them.

Shapes: T trained tokens of a tree, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forge.rl.losses.stats import TokenStats

COLUMNS = ("logprobs", "log_ratios", "entropies", "advantages", "flags")
"""Rows of `TokenValues.columns`:

logprobs     log pi, at the temperature of sampling
log_ratios   log pi - log pi_behavior, also if the loss has recomputed log-probs in its ratio
entropies    of the token's distribution, in nats, at that temperature
advantages   before a KL penalty and a teacher's part
flags        sum of CLIPPED and MASKED
"""
CLIPPED = 1
"""The ratio exceeds a bound of the loss."""
MASKED = 2
"""The off-policy correction masks the token: it has no gradient."""


def _none() -> Tensor:
    return torch.zeros(len(COLUMNS), 0, dtype=torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of the trained tokens of some samples, sample after sample."""

    numbers: tuple[int, ...] = ()
    """`Sample.number` of each sample."""
    lengths: tuple[int, ...] = ()
    """Trained tokens of each sample."""
    columns: Tensor = field(default_factory=_none)
    """[5, K] float16 in host memory; larger values are clamped to its range."""


def token_values(stats: Sequence[TokenStats], keep: Collection[int]) -> TokenValues:
    """The values of the samples whose number is in `keep`."""
    kept = frozenset(keep)
    parts, numbers, lengths = [], [], []
    for one in stats if kept else ():
        if kept.isdisjoint(one.numbers):
            continue
        ends = one.lengths.cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        places = [
            (start, end, number)
            for start, end, number in zip(starts, ends, one.numbers, strict=True)
            if number in kept
        ]
        numbers += [number for _, _, number in places]
        lengths += [end - start for start, end, _ in places]
        chosen_K = torch.cat([torch.arange(start, end) for start, end, _ in places])
        parts.append(_columns(one, chosen_K.to(one.logprobs.device)))
    if not parts:
        return TokenValues()
    largest = torch.finfo(torch.float16).max
    columns = torch.cat(parts, dim=1).clamp(-largest, largest).half()
    return TokenValues(numbers=tuple(numbers), lengths=tuple(lengths), columns=columns.cpu())


def _columns(stats: TokenStats, chosen_K: Tensor) -> Tensor:
    """[5, K] float32 of one tree."""
    logprobs_K = stats.logprobs[chosen_K].float()
    flags_K = stats.clipped[chosen_K] * float(CLIPPED) + stats.masked[chosen_K] * float(MASKED)
    return torch.stack(
        [
            logprobs_K,
            logprobs_K - stats.behavior[chosen_K],
            stats.entropy[chosen_K].float(),
            stats.advantages[chosen_K].float(),
            flags_K,
        ]
    )
