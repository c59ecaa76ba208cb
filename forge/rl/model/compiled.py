"""Layers of a model, compiled by torch for passes over trees: few kernels in place of many.

Owns which layers are compiled and when. Attention over the tree stays outside of their graphs, so
one compilation serves all layers of a type and every tree. Passes without a tree and those in the
type of the parameters, as of the check before training, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from forge.core.errors import InvalidArgument
from forge.rl.model.forked_states import is_recurrent
from forge.rl.numerics import wide_vectors
from forge.rl.parallel.sharding import layers_of


def compile_layers(model: nn.Module) -> None:
    """Compile each layer at its first pass over a tree under autocast, for any number of tokens.
    Idempotent.

    Raises `InvalidArgument` for a model whose layers do more than a graph has.
    """
    layers = layers_of(model)
    reason = _uncompilable(model) if layers else "transformers marks none of its modules as layers"
    if reason:
        raise InvalidArgument(f"the layers of {type(model).__name__} are not compiled: {reason}")
    for layer in layers:
        layer.forward = partial(_forward, layer, layer.forward)


def _uncompilable(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            return "it has experts"
        if is_recurrent(module):
            return "it has recurrent layers"
        if hasattr(module, "lora_A"):
            return "it has adapters"
    return ""


def _forward(layer: nn.Module, other: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """`other` computes the passes that are not compiled."""
    narrow = torch.is_autocast_enabled(next(layer.parameters()).device.type)
    if not narrow or named.get("tree") is None:
        return other(*given, **named)
    with wide_vectors(layer):
        return _compiled(type(layer).forward)(layer, *given, **named)


@cache
def _compiled(forward: Any) -> Any:
    """One per type of layer."""
    return torch.compile(forward, dynamic=True)
