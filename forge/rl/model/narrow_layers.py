"""Layers that are gathered, or kept, in 16 bits.

Frozen matrices may be kept in 16 bits (`numerics.store_frozen_narrow`), and ranks may gather
layers in them (`forge.rl.parallel.sharding`). A pass under autocast multiplies in that type, but
norms and other parameters that autocast does not round compute in float32: `norm * x` of two
tensors in 16 bits would be rounded once more than the engine's. The check before training computes
all in a wider type. Owns the weights of both: a layer widens its own, and in the backward once
more, so that no copy of the model is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from forge.rl.model.recomputation import recomputed
from forge.rl.numerics import (
    is_narrow,
    matrix_type,
    narrow_parameters,
    wide_modules,
    wide_vectors,
    with_parameters,
)


def widen_layers(model: nn.Module) -> None:
    """Let each layer, and each linear layer outside of them, widen weights where a pass needs it.
    Idempotent. The head is wide, and has a forward of its own (`numerics.patch`)."""
    wide = wide_modules(model)
    for module in _outermost(model):
        if module not in wide:
            module.forward = partial(_forward, module)


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.children():
        if isinstance(module, GradientCheckpointingLayer | nn.Linear):
            yield module
        else:
            yield from _outermost(module)


def _forward(module: nn.Module, *given: Any, **named: Any) -> Any:
    own = partial(type(module).forward, module)
    kind = matrix_type(given[0] if given else next(iter(named.values())))
    if is_narrow(kind):
        with wide_vectors(module):
            return own(*given, **named)
    if not any(narrow_parameters(module)):
        return own(*given, **named)
    wide = partial(_widened, module, kind)
    if not torch.is_grad_enabled():
        return wide(*given, **named)
    return checkpoint(wide, *given, use_reentrant=False, context_fn=recomputed, **named)


def _widened(module: nn.Module, kind: torch.dtype, *given: Any, **named: Any) -> Any:
    with ExitStack() as stack:
        for inner, name, one in list(narrow_parameters(module)):
            stack.enter_context(with_parameters(inner, {name: one.to(kind)}))
        return type(module).forward(module, *given, **named)
