"""Policy-gradient losses over the trained tokens of a batch, and what to watch about them.

Owns the formulas. Log-probs come from `forge.rl.policy`, advantages from
`forge.core.advantages`, and whoever sums over several trees divides by the whole batch's token
count, so that a token weighs the same wherever it was packed.

Shape: T trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_RATIO_CAP = 5.0
"""ScaleRL (arXiv 2510.13786) finds CISPO insensitive between 4 and 8."""


def cispo_loss(
    logprobs_T: Tensor, behavior_T: Tensor, advantages_T: Tensor, *, ratio_cap: float
) -> Tensor:
    """The sum over tokens of CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4; M2 drops its eps_low):

        -sum_t sg(clip(r_t, 0, cap)) * A_t * log pi(o_t),   r_t = pi(o_t) / pi_behavior(o_t)

    `ratio_cap` is the cap itself: the paper's 1 + eps_high, and TRL's `epsilon_high`. Unlike
    PPO's clip, no token loses its gradient; unlike REINFORCE, none can dominate.
    """
    weights_T = (logprobs_T.detach() - behavior_T).exp().clamp(max=ratio_cap)
    return -(weights_T * advantages_T * logprobs_T).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """What a pass over one tree tells about its trained tokens; all [T], detached."""

    logprobs: Tensor
    behavior: Tensor
    entropy: Tensor
    versions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """How the policy trained on relates to the one that sampled, over a batch's tokens."""

    clip_fraction: float = 0.0
    """Share of tokens whose ratio exceeded the cap."""
    entropy: float = 0.0
    """Mean, nats."""
    logprob_gap_mean: float = 0.0
    """Mean of |log pi - log pi_behavior|: trainer against sampler, staleness included."""
    logprob_gap_p99: float = 0.0
    staleness_mean: float = 0.0
    """Weight versions between the sampling and the training of a token."""
    staleness_max: float = 0.0


def policy_stats(
    stats: Sequence[TokenStats], *, ratio_cap: float, weight_version: int
) -> PolicyStats:
    """Over all tokens of a batch; `weight_version` is that of the policy trained on."""
    if not stats:
        return PolicyStats()
    gaps_T = torch.cat([one.logprobs.float() - one.behavior for one in stats])
    sizes_T = gaps_T.abs()
    staleness_T = weight_version - torch.cat([one.versions for one in stats]).double()
    rank_p99 = max(1, round(0.99 * len(sizes_T)))
    return PolicyStats(
        clip_fraction=float((gaps_T.exp() > ratio_cap).double().mean()),
        entropy=float(torch.cat([one.entropy for one in stats]).double().mean()),
        logprob_gap_mean=float(sizes_T.double().mean()),
        logprob_gap_p99=float(sizes_T.kthvalue(rank_p99).values),
        staleness_mean=float(staleness_T.mean()),
        staleness_max=float(staleness_T.max()),
    )
