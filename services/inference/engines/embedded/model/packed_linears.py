"""Linear layers whose matrices oneDNN has in its own layout, on a CPU.

Without it each call brings the matrix into that layout again, which takes longer than the product
of a decode step. Owns which matrices are packed, and the forward pass of their layers. The products
are those of the plain layers over many rows: equal in 16 bits, up to the order of sums in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.rl.numerics import is_narrow

Packed = torch.Tensor
"""A matrix in oneDNN's layout; only its operator reads it."""

_LEAST_NARROW = 1 << 16
"""Elements; a smaller matrix gains less than the longer call of the operator costs."""
_LEAST_WIDE = 1 << 19
"""The same in float32, where the plain product is nearer to oneDNN's."""

_ROWS_FOR_ONE = 4
"""oneDNN adds up a single row in an order of its own. Four take no longer, and each adds up like a
row among many, as in the trainer."""


class PackedLinear:
    """One linear layer: packed from the first `serve` on, before that the plain one."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self.layer = layer
        self.weight = layer.weight
        self._bias = layer.bias
        self._type = layer.weight.dtype
        self._plain: Callable[..., torch.Tensor] = layer.forward
        self._packed: Packed | None = None
        self.called = False
        """Whether a pass has called the layer. Some layers are never called: Mamba reads the matrix
        of `dt_proj` itself, so it must stay plain."""
        # The parameter stays in the layer: its name, shape and type are those of the weights.
        layer.forward = self._forward  # type: ignore[method-assign, assignment]

    @property
    def packed(self) -> Packed | None:
        """The served matrix; None for the plain one."""
        return self._packed

    def serve(self, packed: Packed | None) -> None:
        """Compute with this matrix from the next call on; None: with the plain one."""
        self._packed = packed

    def _forward(self, given: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            self.called = True
            return self._plain(given)
        rows = given.to(self._type)
        alone = is_narrow(self._type) and rows.numel() == rows.shape[-1]
        if alone:
            rows = rows.expand(*rows.shape[:-2], _ROWS_FOR_ONE, -1)
        found = product(rows, self._packed, self._bias)
        return found[..., :1, :] if alone else found


def pack(matrix: torch.Tensor) -> Packed:
    """Return a copy in oneDNN's layout; thread-safe."""
    with torch.no_grad():
        packed: Packed = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), None)
    return packed


def product(rows: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear layer of a packed matrix."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return found


def placeholder(matrix: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type without memory, for a matrix that is packed. It is NaN:
    what reads it in place of the packed matrix must not pass for a product."""
    return matrix.new_full((1,), math.nan).expand(matrix.shape)


def packable(model: Any) -> Sequence[PackedLinear]:
    """Replace the forward pass of all linear layers whose matrix is worth it; none on a GPU and
    without oneDNN."""
    return [PackedLinear(one) for one in model.modules() if _is_worth(one)]


def is_worth(matrix: torch.Tensor) -> bool:
    """Whether the product is faster with this matrix packed."""
    least = _LEAST_NARROW if is_narrow(matrix.dtype) else _LEAST_WIDE
    return _can_pack(matrix) and matrix.numel() >= least


def _is_worth(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear and is_worth(module.weight)


def _can_pack(matrix: torch.Tensor) -> bool:
    if matrix.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if matrix.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if matrix.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return matrix.dtype is torch.float32
