"""Losses and acceptance of drafts, row by row.

Owns the losses between the policy's distribution p at a context, detached, and a head's q:

    topk_kl        sum_{v in top-k of p} p_v log(p_v / q_v) + P log(P / Q),  P, Q: the rest's mass
    tv             1/2 sum_v |p_v - q_v|
    cross_entropy  -log q(o), o the token that was sampled

In `topk_kl` all tokens outside the top k are one more event, so mass outside the top k has a cost.
`tv` is the share of rejected drafts: lossless speculative sampling (arXiv 2211.17192) accepts a
draft from q with probability sum_v min(p_v, q_v) = 1 - tv.

Shapes: R rows, V vocabulary, E edges that leave the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def topk_kl(policy_RV: Tensor, drafted_RV: Tensor, *, top_k: int) -> Tensor:
    """[R], nats; both are log-probabilities, the second is differentiable."""
    size = min(top_k, policy_RV.shape[-1])
    log_p, places = policy_RV.topk(size, dim=-1)
    log_q = drafted_RV.gather(-1, places)
    inside = (log_p.exp() * (log_p - log_q)).sum(-1)
    if size == policy_RV.shape[-1]:
        return inside
    # Summed, not subtracted from 1: for small masses the difference would lose all digits.
    rest = torch.ones_like(policy_RV, dtype=torch.bool).scatter_(-1, places, False)
    rest_p = policy_RV.masked_fill(~rest, -torch.inf).logsumexp(-1)
    rest_q = drafted_RV.masked_fill(~rest, -torch.inf).logsumexp(-1)
    return inside + rest_p.exp() * (rest_p - rest_q)


def total_variation(policy_RV: Tensor, drafted_RV: Tensor) -> Tensor:
    """[R], between 0 and 1."""
    return (policy_RV.exp() - drafted_RV.exp()).abs().sum(-1) / 2


def acceptance(policy_RV: Tensor, drafted_RV: Tensor) -> Tensor:
    """[R]: probability that a token drawn from the draft is accepted."""
    return torch.minimum(policy_RV, drafted_RV).exp().sum(-1)
