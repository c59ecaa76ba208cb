"""Layers of a model, compiled by torch for passes over trees: few kernels in place of many.

Owns which layers are compiled and when. Attention over the tree stays outside of their graphs, so
one compilation serves all layers of a type and every tree: two graphs, with and without gradients.
A graph depends on the offset of a view in its inputs, so a policy copies the positions. Two kinds
of passes are not compiled: those without a tree, and those in the parameters' type, such as the
check before training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from forge.core.errors import InvalidArgument
from forge.rl.model.forked_states import is_recurrent
from forge.rl.numerics import wide_vectors
from forge.rl.parallel.sharding import layers_of

log = logging.getLogger(__name__)
_CHECKPOINTING = "forward_with_checkpointing"
"""Name of the wrapper that transformers puts around the forward of each type of layer."""


def compile_layers(model: nn.Module) -> None:
    """Compile each layer at its first pass over a tree under autocast, for any number of tokens.
    Idempotent. Logs a warning once if torch compiles no further graphs of a layer.

    Raises `InvalidArgument` for a model whose layers do more than a graph has.
    """
    layers = layers_of(model)
    reason = _uncompilable(model) if layers else "transformers marks none of its modules as layers"
    if reason:
        raise InvalidArgument(f"the layers of {type(model).__name__} are not compiled: {reason}")
    for layer in layers:
        layer.forward = partial(_forward, layer, layer.forward)
    logging.getLogger("torch._dynamo.convert_frame").addHandler(_at_limit)


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
    kind: Any = type(layer)
    own = _own_forward(kind)
    with wide_vectors(layer):
        compute = partial(_compiled(own), layer, **named)
        if own is not kind.forward and layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(compute, *given)  # type: ignore[operator]
        return compute(*given)


@cache
def _own_forward(kind: Any) -> Any:
    """Return the forward of a type of layer, without transformers' activation checkpointing. That
    wrapper is one code object for all types, and FSDP's types have it twice: torch counts all their
    graphs together, up to its limit.
    """
    forward: Any = kind.forward
    while forward.__code__.co_name == _CHECKPOINTING:
        forward = forward.__wrapped__
    return forward


@cache
def _compiled(forward: Any) -> Any:
    """One per type of layer."""
    return torch.compile(forward, dynamic=True)


class _AtLimit(logging.Handler):
    """Observes torch's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.met = False

    def emit(self, record: logging.LogRecord) -> None:
        """Warn of the first limit that torch reports."""
        said = record.getMessage()
        if not self.met and "recompile_limit" in said:
            self.met = True
            log.warning(
                "torch compiles no further graphs of a layer, whose other passes are slower: %s",
                " ".join(said.split()),
            )


_at_limit = _AtLimit()
