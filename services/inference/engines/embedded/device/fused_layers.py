"""The layers of a model with their small operations fused, by torch.compile.

Norms, casts, rotary embeddings and gates are most of a layer's kernels, and each takes longer to
begin than to compute. All layers share their compiled code, for any number of rows; attention and
mixtures of experts, with their routers, stay as they are. Compilation takes some seconds, once per
model and machine: its result is cached.

TORCHDYNAMO_DISABLE=1 in the environment turns it off, as for all of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch

from forge.rl.numerics import is_narrow, with_forward
from forge.rl.routing import records_routes
from services.inference.engines.embedded.kv import attention

_TOLERANCE = 0.001
_NARROW_TOLERANCE = 0.1
# No processes beside the worker; and fused casts round, too, as the trainer's do.
_OPTIONS: dict[str, Any] = {"compile_threads": 1, "emulate_precision_casts": True}


def tolerated_error(dtype: torch.dtype) -> float:
    """Largest mean difference of log-probs, in nats, between faster and plain layers whose matrices
    have this type."""
    return _NARROW_TOLERANCE if is_narrow(dtype) else _TOLERANCE


class FusedLayers:
    """The layers of one model."""

    def __init__(self, model: Any) -> None:
        layers: Any = getattr(model.get_decoder(), "layers", ())
        self._config = model.config
        self._layers: list[Any] = list(layers)
        self._mixtures = [
            part for layer in self._layers for part in layer.children() if _is_mixture(part)
        ]
        for mixture in self._mixtures:
            mixture._plain_forward = mixture.forward
        self._fused = [
            torch.compile(layer.forward, dynamic=True, options=_OPTIONS) for layer in self._layers
        ]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within, passes of this model use the fused layers. The first one compiles: not within a
        capture."""
        with ExitStack() as undo:
            undo.callback(setattr, self._config, "_attn_implementation", attention.IMPLEMENTATION)
            self._config._attn_implementation = _uncompiled_attention()
            for layer, fused in zip(self._layers, self._fused, strict=True):
                undo.enter_context(with_forward(layer, fused))
            for mixture in self._mixtures:
                uncompiled = MethodType(_run_uncompiled, mixture)
                undo.enter_context(with_forward(mixture, uncompiled))
            yield


def _is_mixture(part: torch.nn.Module) -> bool:
    """Whether this part of a layer has experts, or a router whose choice is recorded."""
    return any(records_routes(one) or "Expert" in type(one).__name__ for one in part.modules())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_uncompiled(mixture: Any, *given: Any, **named: Any) -> Any:
    """The forward of a mixture of experts: one function for all, or layers would share no code."""
    return mixture._plain_forward(*given, **named)


@cache
def _uncompiled_attention() -> str:
    """Register the engine's attention under another name, with which compiled layers call it."""
    name = f"{attention.IMPLEMENTATION}_uncompiled"
    attention.register(name, torch.compiler.disable(attention.implementation))  # type: ignore[no-untyped-call]
    return name
