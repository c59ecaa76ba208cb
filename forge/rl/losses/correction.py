"""Off-policy correction: what happens to tokens that another distribution sampled.

Owns weights and masks between the behavior policy mu (what the engine sampled from, possibly
several weight versions ago) and the policy that ratios are taken against. Masked tokens give no
gradient and stay in the count that the loss is divided by, so a mask never makes others heavier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge.rl.losses.tokens import TrainedTokens

OldLogprobs = Literal["behavior", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Which tokens count how much; by default all count fully."""

    weight_cap: float = 0.0
    """Truncated importance sampling: weigh tokens by min(pi_old / mu, cap); 0: do not. Only with
    recomputed old log-probs: elsewhere the loss's own ratio is this one already."""
    mask_ratio_low: float = 0.0
    mask_ratio_high: float = math.inf
    """Tokens whose pi/mu is outside [low, high] are left out (IcePop, arXiv 2510.18855)."""
    mask_staleness: int = 0
    """Tokens sampled more versions ago are left out; 0: none is."""
    mask_kl_max: float = 0.0
    """Samples with a larger mean of log(mu/pi) lose their tokens of negative advantage (the
    off-policy sequence mask of DeepSeek-V3.2, arXiv 2512.02556); 0: none do."""

    def weights(self, tokens: TrainedTokens) -> Tensor | None:
        """[T], no gradient; None when every token counts fully. 0 is a masked token."""
        kept_T = self._kept(tokens)
        if not self.weight_cap:
            return kept_T
        weights_T = (tokens.old - tokens.behavior).exp().clamp(max=self.weight_cap)
        return weights_T if kept_T is None else weights_T * kept_T

    def _kept(self, tokens: TrainedTokens) -> Tensor | None:
        logprobs_T = tokens.logprobs.detach()
        kept: list[Tensor] = []
        if self.mask_ratio_low > 0 or self.mask_ratio_high < math.inf:
            ratio_T = (logprobs_T - tokens.behavior).exp()
            kept.append((ratio_T >= self.mask_ratio_low) & (ratio_T <= self.mask_ratio_high))
        if self.mask_staleness:
            kept.append(tokens.staleness <= self.mask_staleness)
        if self.mask_kl_max:
            means_S = tokens.sums(tokens.behavior - logprobs_T) / tokens.lengths
            near_T = tokens.spread(means_S <= self.mask_kl_max)
            kept.append(near_T | (tokens.advantages >= 0))
        if not kept:
            return None
        return torch.stack(kept).all(0).to(logprobs_T.dtype)
