"""Memory that ends in the middle of a model's pass, truly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from forge.rl.learner.learner import Learner

NO_MACHINE_HAS = 1 << 60


@contextmanager
def memory_for(
    one: Learner, tokens: int, *, backward: bool = False, layer: int = -1
) -> Iterator[list[int]]:
    """The allocator fails for passes above that size, after a layer or before its backward; yields
    the sizes that were tried."""
    sizes: list[int] = []

    def forward(_: Any, inputs: Any, outputs: Any) -> None:
        output: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        sizes.append(output.shape[1])
        if sizes[-1] > tokens:
            exhaust: Callable[[Any], Any] = lambda _: torch.empty(NO_MACHINE_HAS)  # noqa: E731
            output.register_hook(exhaust) if backward else exhaust(None)

    hook = one.policy.model.base_model.layers[layer].register_forward_hook(forward)
    yield sizes
    hook.remove()
