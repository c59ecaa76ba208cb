"""The loss of the weights that inference serves, with gradients for the weights behind them.

Published weights are master weights rounded to a shorter type. Autocast rounds what linear layers
multiply by, and leaves embeddings, norms and the head as they are: without more, the loss would be
that of a policy which nobody samples from. Owns the rounding of what is left, for the time of a
forward and its backward: gradients then go to the master weights as if nothing had been rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ServedValues:
    """Of one model's parameters."""

    def __init__(
        self, model: Any, *, published: torch.dtype, autocast: torch.dtype | None = None
    ) -> None:
        """`published` is the type that inference gets. Parameters already of it cost nothing."""
        head = model.get_output_embeddings().weight
        rounded_by_autocast = {
            id(layer.weight)
            for layer in model.modules()
            if isinstance(layer, nn.Linear) and layer.weight is not head and autocast == published
        }
        self._type = published
        self._parameters: list[nn.Parameter] = [
            one
            for one in model.parameters()
            if one.is_floating_point() and id(one) not in rounded_by_autocast
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, parameters have the values published; afterwards, those they had before.

        What is computed within is differentiated within.
        """
        master = []
        for one in self._parameters:
            master.append(one.data)
            one.data = one.data.to(self._type).to(one.dtype)
        try:
            yield
        finally:
            for one, data in zip(self._parameters, master, strict=True):
                one.data = data
