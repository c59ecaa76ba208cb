"""The load-balance loss of mixture-of-experts models, over all tokens of a batch's samples.

Owns the loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6) as transformers computes
it, pooled over layers:

    coef * X * sum_x (counts_x / rows) * (mass_x / rows)

where counts_x is how often expert x was chosen and mass_x the sum of its probabilities. Sums are
over the samples of a batch, not over the tree: a token counts once per sample that contains it. A
product of two means is not a sum over passes, so the counts of the whole batch are taken before any
backward pass; counts have no gradient.

Shapes: L tokens of a pass, X experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.rl.collectives import all_reduce


class RouterBalance:
    """Router statistics of one model over a batch."""

    def __init__(self, config: Any, *, coef: float) -> None:
        """Raises `InvalidArgument` for a model without experts."""
        top_k = getattr(config, "num_experts_per_tok", None)
        if not top_k:
            raise InvalidArgument(
                f"balance_coef = {coef} is not allowed: a model of type "
                f"{config.model_type!r} has no experts to balance"
            )
        self.coef = coef
        self._top_k: int = top_k
        self.complete = False
        """Counts are those of the whole batch: further passes do not add to them."""
        self.value = 0.0
        """Sum of the loss over passes that were differentiated."""
        self._counts_X: Tensor | None = None
        self._rows = 0.0

    def reset(self) -> None:
        """Begin a batch."""
        self.complete = False
        self.value = 0.0
        self._counts_X, self._rows = None, 0.0

    def mass(self, router_logits: Sequence[Tensor], weights_L: Tensor) -> Tensor:
        """[X] sum of router probabilities over tokens and layers, differentiable."""
        total_X = router_logits[0].new_zeros(router_logits[0].shape[-1], dtype=torch.float64)
        for logits in router_logits:
            probs_LX = logits.flatten(0, -2).softmax(-1, dtype=wide(logits))
            total_X = total_X + weights_L.to(probs_LX) @ probs_LX
        return total_X

    def count(self, router_logits: Sequence[Tensor], weights_L: Tensor) -> None:
        """Add the experts chosen in a pass."""
        if self.complete:
            return
        for logits in router_logits:
            chosen_LK = logits.detach().flatten(0, -2).softmax(-1).topk(self._top_k).indices
            weights_LK = weights_L[:, None].expand_as(chosen_LK).to(logits.device).double()
            counts_X = weights_LK.new_zeros(logits.shape[-1])
            counts_X.index_add_(0, chosen_LK.flatten(), weights_LK.flatten())
            self._counts_X = counts_X if self._counts_X is None else self._counts_X + counts_X
            self._rows += float(weights_L.sum())

    def totals(self) -> Tensor | float:
        """Counts and rows in one vector, to be summed over ranks; 0 before the first pass."""
        if self._counts_X is None:
            return 0.0
        rows = self._counts_X.new_tensor([self._rows])
        return torch.cat([self._counts_X, rows])

    def sum_over(self, group: dist.ProcessGroup, *, earlier: Tensor | float = 0.0) -> None:
        """Set the totals to the sums over all ranks, except for `earlier` ones, which are sums
        already."""
        own = self.totals() - earlier
        assert isinstance(own, Tensor), "a pass has been made"
        all_reduce(own, group)
        totals = own + earlier
        self._counts_X, self._rows = totals[:-1], float(totals[-1])

    def loss(self, mass_X: Tensor) -> Tensor:
        """A pass's part of the loss; needs the counts of the whole batch."""
        assert self._counts_X is not None
        scale = self.coef * len(mass_X) / self._rows**2
        share = scale * (self._counts_X.to(mass_X) * mass_X).sum()
        self.value += float(share.detach())
        return share


def wide(tensor: Tensor) -> torch.dtype:
    """The tensor's type, at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)
