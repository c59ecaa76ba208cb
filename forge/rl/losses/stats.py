"""Statistics of a step: how the trained policy differs from the policy that sampled.

Owns the statistics over a batch's tokens, all without gradient.

Shape: T trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Columns over the trained tokens of one tree; all [T], detached."""

    logprobs: Tensor
    behavior: Tensor
    entropy: Tensor
    versions: Tensor
    clipped: Tensor
    """Bool: the ratio exceeds a bound of the loss."""
    masked: Tensor
    """Bool: masked by the off-policy correction."""
    reference_kl: Tensor
    teacher_gaps: Tensor
    """log pi - log pi_teacher; zeros without a teacher."""
    gradient_size: Tensor
    """|d loss / d log pi|."""
    lengths: Tensor
    """[S] tokens of each sample; tokens of a sample are contiguous."""
    domains: tuple[str, ...]
    """[S]"""
    advantages: Tensor
    """Advantages of the loss, before a KL penalty and a teacher's part."""
    engines: tuple[str, ...] = ()
    """[S], of the engines that sampled; empty: unknown."""
    numbers: tuple[int, ...] = ()
    """[S], `Sample.number`; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainStats:
    """Means over one domain's tokens of a batch."""

    tokens: int
    entropy: float
    clip_fraction: float
    staleness_mean: float
    gradient_share: float
    """Share of the sum over all tokens of |d loss / d log pi|."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionGap:
    """The gap over the tokens that one weight version sampled."""

    tokens: int
    gap_sum: float
    """Sum of |log pi - log pi_behavior|."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Differences between the trained policy and one engine's tokens of a batch; as in
    PolicyStats."""

    tokens: int
    logprob_gap_mean: float
    inference_gap_mean: float
    inference_gap_staleness: float
    staleness_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """Differences between trained and sampling policy, over a batch's tokens."""

    clip_fraction: float = 0.0
    """Share of tokens whose ratio exceeds a bound of the loss."""
    masked_fraction: float = 0.0
    """Share of tokens masked by the off-policy correction."""
    entropy: float = 0.0
    """Mean, nats."""
    reference_kl: float = 0.0
    """Mean over tokens of the k3 estimate of KL(pi || reference); 0 without a reference."""
    teacher_kl: float = 0.0
    """Mean over tokens of log pi - log pi_teacher, the k1 estimate of KL(pi || teacher); 0 without
    a teacher."""
    logprob_gap_mean: float = 0.0
    """Mean of |log pi - log pi_behavior|: trainer against sampler, staleness included."""
    logprob_gap_p99: float = 0.0
    behavior_kl: float = 0.0
    """k3 estimate of KL(pi_behavior || pi), staleness included."""
    inference_gap_mean: float = 0.0
    """Mean of |log pi - log pi_behavior| over the tokens of least staleness: trainer against
    engine, with the least movement of the policy that the batch allows."""
    inference_gap_staleness: float = 0.0
    """The staleness of those tokens."""
    staleness_mean: float = 0.0
    """Weight versions between the sampling and the training of a token."""
    staleness_max: float = 0.0
    gaps: Mapping[int, VersionGap] = field(default_factory=dict)
    """By the version that sampled."""


def policy_stats(stats: Sequence[TokenStats], *, weight_version: int) -> PolicyStats:
    """Statistics over all tokens of a batch; `weight_version` is that of the trained policy."""
    if not stats:
        return PolicyStats()
    gaps_T = torch.cat([one.logprobs.float() - one.behavior for one in stats])
    sizes_T = gaps_T.abs()
    versions_T = torch.cat([one.versions for one in stats])
    staleness_T = weight_version - versions_T.double()
    rank_p99 = max(1, round(0.99 * len(sizes_T)))
    freshest = staleness_T.min()
    wide_T = gaps_T.double()
    return PolicyStats(
        clip_fraction=_mean([one.clipped for one in stats]),
        masked_fraction=_mean([one.masked for one in stats]),
        entropy=_mean([one.entropy for one in stats]),
        reference_kl=_mean([one.reference_kl for one in stats]),
        teacher_kl=_mean([one.teacher_gaps for one in stats]),
        logprob_gap_mean=float(sizes_T.double().mean()),
        logprob_gap_p99=float(sizes_T.kthvalue(rank_p99).values),
        behavior_kl=float((wide_T.exp() - 1 - wide_T).mean()),
        inference_gap_mean=float(sizes_T[staleness_T == freshest].double().mean()),
        inference_gap_staleness=float(freshest),
        staleness_mean=float(staleness_T.mean()),
        staleness_max=float(staleness_T.max()),
        gaps=_gaps(versions_T, sizes_T.double()),
    )


def _gaps(versions_T: Tensor, sizes_T: Tensor) -> dict[int, VersionGap]:
    found, kinds_T, counts = torch.unique(versions_T, return_inverse=True, return_counts=True)
    sums = sizes_T.new_zeros(len(found)).index_add(0, kinds_T, sizes_T)
    return {
        int(version): VersionGap(tokens=int(tokens), gap_sum=float(gap_sum))
        for version, tokens, gap_sum in zip(found, counts, sums, strict=True)
    }


def domain_stats(stats: Sequence[TokenStats], *, weight_version: int) -> dict[str, DomainStats]:
    """Statistics by domain, over all tokens of a batch."""
    names = sorted({name for one in stats for name in one.domains})
    if not names:
        return {}
    kinds_T = torch.cat([_of_tokens(one, one.domains, names) for one in stats])

    def sums(parts: Sequence[Tensor]) -> list[float]:
        values_T = torch.cat(list(parts)).double()
        totals: list[float] = (
            values_T.new_zeros(len(names)).index_add(0, kinds_T, values_T).tolist()
        )
        return totals

    tokens = torch.bincount(kinds_T, minlength=len(names)).tolist()
    entropy, clipped = sums([one.entropy for one in stats]), sums([one.clipped for one in stats])
    staleness = sums([weight_version - one.versions for one in stats])
    sizes = sums([one.gradient_size for one in stats])
    return {
        name: DomainStats(
            tokens=tokens[kind],
            entropy=entropy[kind] / tokens[kind],
            clip_fraction=clipped[kind] / tokens[kind],
            staleness_mean=staleness[kind] / tokens[kind],
            gradient_share=sizes[kind] / (sum(sizes) or 1.0),
        )
        for kind, name in enumerate(names)
    }


def engine_stats(stats: Sequence[TokenStats], *, weight_version: int) -> dict[str, EngineStats]:
    """Statistics by engine, over all tokens of a batch whose engine is known."""
    known = [one for one in stats if one.engines]
    names = sorted({name for one in known for name in one.engines})
    if not names:
        return {}
    kinds_T = torch.cat([_of_tokens(one, one.engines, names) for one in known])
    sizes_T = torch.cat([one.logprobs.float() - one.behavior for one in known]).double().abs()
    staleness_T = weight_version - torch.cat([one.versions for one in known]).double()
    found = {}
    for kind, name in enumerate(names):
        own_T = kinds_T == kind
        if not own_T.any():
            continue
        gaps_T, ages_T = sizes_T[own_T], staleness_T[own_T]
        freshest = ages_T.min()
        found[name] = EngineStats(
            tokens=len(gaps_T),
            logprob_gap_mean=float(gaps_T.mean()),
            inference_gap_mean=float(gaps_T[ages_T == freshest].mean()),
            inference_gap_staleness=float(freshest),
            staleness_mean=float(ages_T.mean()),
        )
    return found


def _of_tokens(one: TokenStats, of_samples: Sequence[str], names: Sequence[str]) -> Tensor:
    """The index of each token's name, from the names of the samples."""
    kinds_S = torch.tensor([names.index(name) for name in of_samples], device=one.lengths.device)
    return kinds_S.repeat_interleave(one.lengths)


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(list(parts)).double().mean())
