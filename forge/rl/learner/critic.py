"""The critic of PPO: values from the policy's backbone, advantages from them, and their loss.

Owns the value head, generalized advantage estimation (GAE, arXiv 1506.02438) and the clipped value
loss. The value of a token is that of the state it was sampled in: one number per row of the prefix
tree. Samples with a shared context share its value and differ only in their returns. The head is
saved with the learner's state and never published.

The episode of GAE is one turn. Its last token gets the turn's return-to-go, which contains all
later rewards of the trajectory; tokens within a turn are not discounted.

    delta_t = V_{t+1} - V_t,   delta_last = G - V_last,   A_t = delta_t + lambda A_{t+1}

Shapes: T trained tokens, sample after sample; S samples; L tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forge.core.errors import InvalidArgument
from forge.rl.config import CriticConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Values and advantages of one tree's tokens before the first update; all [T], no gradient."""

    values: Tensor
    targets: Tensor
    """Targets of the values: A + V."""
    advantages: Tensor


class Critic:
    """A value head, its advantages and its loss."""

    def __init__(
        self, channels: int, config: CriticConfig, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`channels` is the size of the backbone's hidden states, `dtype` the type of its weights;
        the head is in fp32 or wider. All values begin at 0."""
        self.config = config
        wide = torch.promote_types(dtype, torch.float32)
        self.head = nn.Linear(channels, 1, dtype=wide, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def credit(
        self, values_T: Tensor, returns_T: Tensor | None, weights_T: Tensor, lengths_S: Tensor
    ) -> Credit:
        """Advantages times `weights_T`: the domain's weight and the share allowed by a grammar.

        Raises `InvalidArgument` for samples without returns.
        """
        if returns_T is None:
            raise InvalidArgument("a critic needs returns; the samples have none")
        values_T = values_T.detach()
        advantages_T = gae(values_T, returns_T, lengths_S, lam=self.config.gae_lambda)
        return Credit(
            values=values_T,
            targets=advantages_T + values_T,
            advantages=advantages_T * weights_T,
        )

    def loss(self, values_T: Tensor, credit: Credit) -> Tensor:
        """[T] half the squared error, or that of the clipped value if larger; no `value_coef`."""
        error_T = (values_T - credit.targets).square()
        if self.config.value_clip:
            change_T = (values_T - credit.values).clamp(
                -self.config.value_clip, self.config.value_clip
            )
            error_T = torch.maximum(error_T, (credit.values + change_T - credit.targets).square())
        return error_T / 2


_BLOCK = 128
"""Tokens that one product sums."""


def gae(values_T: Tensor, returns_T: Tensor, lengths_S: Tensor, *, lam: float) -> Tensor:
    """[T] advantages; `returns_T` has the sample's return at each of its tokens."""
    if lam == 1.0:  # the sum of deltas without its rounding, and without a loop over tokens
        return returns_T - values_T
    lasts_T = torch.zeros_like(values_T, dtype=torch.bool)
    lasts_T[lengths_S.cumsum(0) - 1] = True
    following_T = torch.where(lasts_T, returns_T, values_T.roll(-1))
    delta_T = following_T - values_T
    return _discounted(delta_T, lengths_S, lam).to(values_T.dtype)


def _discounted(delta_T: Tensor, lengths_S: Tensor, lam: float) -> Tensor:
    """[T] fp64 sum of each token's delta and those after it in its sample, times a power of `lam`.

    A product with the powers sums within a block of tokens; the loop carries the sum of a block to
    the one before it, in all samples at once.
    """
    blocks_S = (lengths_S + _BLOCK - 1) // _BLOCK
    first_S = blocks_S.cumsum(0) - blocks_S
    starts_S = lengths_S.cumsum(0) - lengths_S
    shift_S = first_S * _BLOCK - starts_S
    places_T = torch.arange(len(delta_T), device=delta_T.device)
    places_T = places_T + shift_S.repeat_interleave(lengths_S, output_size=len(delta_T))
    # The last block of a sample ends with zeros, which add nothing to the tokens before them.
    padded_BK = delta_T.new_zeros(int(blocks_S.sum()), _BLOCK, dtype=torch.float64)
    padded_BK.view(-1)[places_T] = delta_T.double()
    steps_K = torch.arange(_BLOCK, device=delta_T.device, dtype=torch.float64)
    distances_KK = steps_K[:, None] - steps_K
    powers_KK = torch.where(distances_KK < 0, 0.0, lam ** distances_KK.clamp(min=0))
    sums_BK = padded_BK @ powers_KK
    reach_K = lam ** (_BLOCK - steps_K)
    for before in reversed(range(int(blocks_S.max()) - 1)):
        blocks = first_S[blocks_S > before + 1] + before
        sums_BK[blocks] += sums_BK[blocks + 1, :1] * reach_K
    return sums_BK.view(-1)[places_T]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """Quality of the values at the begin of the batch."""

    value_loss: float = 0.0
    explained_variance: float = 0.0
    """1 - Var(target - V) / Var(target): 1 is perfect, 0 no better than a constant, or nothing to
    explain."""


def critic_stats(credits: Sequence[Credit]) -> CriticStats:
    """Over all tokens of a batch."""
    if not credits:
        return CriticStats()
    values_T = torch.cat([one.values for one in credits]).double()
    targets_T = torch.cat([one.targets for one in credits]).double()
    variance = float(targets_T.var(correction=0))
    residual = float((targets_T - values_T).var(correction=0))
    return CriticStats(
        value_loss=float((values_T - targets_T).square().mean() / 2),
        explained_variance=1.0 - residual / variance if variance > 0 else 0.0,
    )
