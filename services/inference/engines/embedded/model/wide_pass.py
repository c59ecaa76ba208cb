"""Passes in float32 over matrices that are stored in 16 bits, without a second copy of the model.

A pass in 16 bits rounds every product, and the roundings hide small faults. In float32 the same
values give the log-probs of the trainer's own forward on them, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from forge.rl.numerics import narrow_parameters, with_forward, with_parameters
from services.inference.engines.embedded.model.packed_linears import PackedLinear


@contextmanager
def widened(model: Any, packed: Sequence[PackedLinear]) -> Iterator[None]:
    """Context in which the model computes with float32 copies of its matrices: those of a layer
    during its pass, packed ones during their product."""
    served = [each for each in packed if each.packed is not None]
    packed_weights = {id(each.weight) for each in served}
    with ExitStack() as undo:
        for each in served:
            undo.enter_context(with_forward(each.layer, partial(_product, each)))
        layers: Sequence[torch.nn.Module] = getattr(model.get_decoder(), "layers", ())
        of_layers: set[int] = set()
        for layer in layers:
            narrow = _narrow(layer, packed_weights)
            of_layers.update(id(one) for _, _, one in narrow)
            undo.enter_context(with_forward(layer, partial(_run, layer.forward, narrow)))
        for inner, name, one in _narrow(model, packed_weights | of_layers):
            undo.enter_context(with_parameters(inner, {name: one.float()}))
        yield


def _narrow(
    module: torch.nn.Module, without: set[int]
) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    return [found for found in narrow_parameters(module) if id(found[2]) not in without]


def _run(
    forward: Callable[..., Any],
    narrow: Sequence[tuple[torch.nn.Module, str, torch.nn.Parameter]],
    *given: Any,
    **named: Any,
) -> Any:
    with ExitStack() as undo:
        for inner, name, one in narrow:
            undo.enter_context(with_parameters(inner, {name: one.float()}))
        return forward(*given, **named)


def _product(layer: PackedLinear, given: torch.Tensor) -> torch.Tensor:
    assert layer.packed is not None
    bias = layer.layer.bias
    return linear(
        given.float(), layer.packed.to_dense().float(), None if bias is None else bias.float()
    )
