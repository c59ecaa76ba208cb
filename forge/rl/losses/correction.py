"""Off-policy correction: weights and masks for tokens sampled from another distribution.

Owns weights and masks between the behavior policy mu (that of the engine, possibly several weight
versions old) and the old policy of the ratios. Masked tokens give no gradient but count in the
loss's denominator, so a mask does not increase the weight of other tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge.rl.config import Correction
from forge.rl.losses.tokens import TrainedTokens


def correction_weights(correction: Correction, tokens: TrainedTokens) -> Tensor | None:
    """[T] without gradient, 0 for masked tokens; None when all weights are 1."""
    kept_T = _kept(correction, tokens)
    if not correction.weight_cap:
        return kept_T
    weights_T = (tokens.old - tokens.behavior).exp().clamp(max=correction.weight_cap)
    return weights_T if kept_T is None else weights_T * kept_T


def _kept(correction: Correction, tokens: TrainedTokens) -> Tensor | None:
    logprobs_T = tokens.logprobs.detach()
    kept: list[Tensor] = []
    if correction.mask_ratio_low or correction.mask_ratio_high:
        ratio_T = (logprobs_T - tokens.behavior).exp()
        high = correction.mask_ratio_high or math.inf
        kept.append((ratio_T >= correction.mask_ratio_low) & (ratio_T <= high))
    if correction.mask_staleness:
        kept.append(tokens.staleness <= correction.mask_staleness)
    if correction.mask_kl_max:
        means_S = tokens.sums(tokens.behavior - logprobs_T) / tokens.lengths
        near_T = tokens.spread(means_S <= correction.mask_kl_max)
        kept.append(near_T | (tokens.advantages >= 0))
    if not kept:
        return None
    return torch.stack(kept).all(0).to(logprobs_T.dtype)
