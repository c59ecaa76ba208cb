"""Computes the loss of the weights that inference serves; gradients go to the master weights.

Published weights are master weights rounded to a shorter type. Autocast rounds the weights of
linear layers, but not embeddings, norms, routers and head: alone, it gives the loss of a policy
that no engine samples from. Owns the rounding of those parameters during a forward and its backward
(straight-through: the gradient treats the rounding as the identity).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge.rl.numerics import wide_modules
from forge.rl.parallel.sharding import local


class ServedValues:
    """Rounds the parameters of one model."""

    def __init__(
        self, model: Any, *, published: torch.dtype, autocast: torch.dtype | None = None
    ) -> None:
        """`published` is the type that inference gets; parameters of that type cost nothing."""
        wide = {id(one) for module in wide_modules(model) for one in module.parameters()}
        rounded_by_autocast = {
            id(layer.weight)
            for layer in model.modules()
            if isinstance(layer, nn.Linear) and id(layer.weight) not in wide
        }
        self._type = published
        self._parameters: list[nn.Parameter] = [
            one
            for one in model.parameters()
            if one.is_floating_point()
            and not (autocast == published and id(one) in rounded_by_autocast)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which parameters have their published values.

        A forward inside the context must have its backward inside too.
        """
        master: list[torch.Tensor] = []
        try:
            for one in self._parameters:
                if isinstance(one, DTensor):  # gathered from this very memory
                    master.append(local(one).detach().clone())
                    local(one.data).copy_(master[-1].to(self._type))
                else:
                    rounded = one.data.to(self._type).to(one.dtype)
                    master.append(one.data)
                    one.data = rounded
            yield
        finally:
            # Not all of them after a shortage of memory.
            for one, data in zip(self._parameters, master, strict=False):
                if isinstance(one, DTensor):
                    local(one.data).copy_(data)
                else:
                    one.data = data
