"""The trained tokens of one pass, as every loss sees them.

Owns the view: columns over tokens, and sums over the sequences they belong to. Log-probs were
gathered from the edges of the merged tree, so an edge that several samples contain appears once
for each of them, with that sample's own columns; autograd adds the gradients up again.

Shapes: T trained tokens, sample after sample; S samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """Columns [T] over the trained tokens of S samples; only `logprobs` carries a gradient."""

    logprobs: Tensor
    """Under the policy being trained."""
    old: Tensor
    """What ratios are taken against: `behavior`, or recomputed by the trainer."""
    behavior: Tensor
    """Under the distribution sampled from, as the engine reported it."""
    advantages: Tensor
    lengths: Tensor
    """[S] trained tokens of each sample: tokens of a sample are contiguous."""
    versions: Tensor
    """Of the weights that sampled each token."""
    weight_version: int
    """Of those stepped from."""
    entropy: Tensor
    """Nats, of the distribution the token was drawn from, under the policy being trained."""
    reference: Tensor | None = None
    """Log-probs under a frozen reference policy, if there is one."""

    @property
    def staleness(self) -> Tensor:
        """Weight versions between the sampling of the token and this step."""
        return self.weight_version - self.versions

    @property
    def ratio(self) -> Tensor:
        """pi(o_t) / pi_old(o_t), differentiable."""
        return (self.logprobs - self.old).exp()

    def sums(self, values_T: Tensor) -> Tensor:
        """[S]: values added up over each sample, differentiable."""
        owners_T = torch.repeat_interleave(self.lengths)
        return values_T.new_zeros(len(self.lengths)).index_add(0, owners_T, values_T)

    def spread(self, values_S: Tensor) -> Tensor:
        """[T]: each sample's value at each of its tokens, differentiable."""
        return values_S.repeat_interleave(self.lengths)

    def following(self, values_T: Tensor) -> Tensor:
        """[T]: sum of the values from each token on to the end of its sample."""
        before_T = values_T.cumsum(0) - values_T
        ends_S = torch.cat([values_T.new_zeros(1), values_T.cumsum(0)])[self.lengths.cumsum(0)]
        return self.spread(ends_S) - before_T


LossFunction = Callable[[TrainedTokens], Tensor]
"""A loss per token, [T]: who calls it masks, weighs, normalizes and adds up."""
