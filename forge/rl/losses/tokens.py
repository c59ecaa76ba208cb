"""The trained tokens of one pass: the input of every loss.

Owns columns over tokens, and sums over their sequences. Log-probs are gathered from the edges of
the prefix tree: an edge of several samples appears once per sample, with that sample's columns, and
autograd sums the gradients.

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
    """Log-probs under the trained policy."""
    old: Tensor
    """Log-probs in the denominator of ratios: `behavior`, or recomputed by the trainer."""
    behavior: Tensor
    """Log-probs in the sampling distribution, as reported by the engine."""
    advantages: Tensor
    lengths: Tensor
    """[S] trained tokens of each sample: tokens of a sample are contiguous."""
    versions: Tensor
    """Weight version that sampled each token."""
    weight_version: int
    """Weight version before the step."""
    entropy: Tensor
    """Entropy of the token's distribution in nats, at its temperature, under the trained policy."""
    reference: Tensor | None = None
    """Log-probs under a frozen reference policy, if there is one."""
    teacher: Tensor | None = None
    """Log-probs under a frozen teacher, if there is one."""
    shares: Tensor | None = None
    """Factor on advantages of tokens drawn from another distribution than the policy's, which
    `advantages` contain; None: 1."""
    trajectories: Tensor | None = None
    """[S] number of each sample's trajectory in the batch; None: each is its own trajectory."""
    trajectory_tokens: Tensor | None = None
    """[S] trained tokens of the sample's trajectory, in this pass and in others; None: its own."""
    trajectory_gaps: Tensor | None = None
    """[S] sum of log pi - log pi_old over these tokens, without gradient; None: they are all in
    this pass."""

    @property
    def staleness(self) -> Tensor:
        """Weight versions between the sampling of the token and this step."""
        return self.weight_version - self.versions

    @property
    def ratio(self) -> Tensor:
        """pi(o_t) / pi_old(o_t), differentiable."""
        return (self.logprobs - self.old).exp()

    def shared(self, values_T: Tensor) -> Tensor:
        """[T] the values times `shares`: estimates of their mean under the policy."""
        return values_T if self.shares is None else values_T * self.shares

    def sums(self, values_T: Tensor) -> Tensor:
        """[S] sums of the values over each sample, differentiable."""
        owners_T = torch.repeat_interleave(self.lengths)
        return values_T.new_zeros(len(self.lengths)).index_add(0, owners_T, values_T)

    @property
    def trajectory_lengths(self) -> Tensor:
        """[S] trained tokens of the sample's trajectory."""
        return self.lengths if self.trajectory_tokens is None else self.trajectory_tokens

    def gaps(self, *, trajectory: bool = False) -> Tensor:
        """[S] sums of log pi - log pi_old over the sample, or over its trajectory, without
        gradient."""
        gaps_S = self.sums(self.logprobs.detach() - self.old)
        if not trajectory or self.trajectories is None:
            return gaps_S
        if self.trajectory_gaps is not None:
            return self.trajectory_gaps
        numbers, places_S = torch.unique(self.trajectories, return_inverse=True)
        sums = gaps_S.new_zeros(len(numbers)).index_add(0, places_S, gaps_S)
        return sums[places_S]

    def spread(self, values_S: Tensor) -> Tensor:
        """[T] each sample's value at each of its tokens, differentiable."""
        return values_S.repeat_interleave(self.lengths)

    def following(self, values_T: Tensor) -> Tensor:
        """[T] sums of the values from each token to the end of its sample."""
        # Differences of sums over the whole pass: in fp32 they would lose the digits of a token.
        sums_T = values_T.cumsum(0, dtype=torch.float64)
        ends_S = sums_T[self.lengths.cumsum(0) - 1]
        return (self.spread(ends_S) - sums_T).to(values_T.dtype) + values_T


LossFunction = Callable[[TrainedTokens], Tensor]
"""A loss per token, [T]; the caller masks, weights, normalizes and sums it."""
