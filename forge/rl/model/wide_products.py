"""Matrix products of the language-model head in fp32, on units that multiply bf16.

A GPU multiplies bf16 matrices some ten times as fast as fp32 ones. An fp32 number is the sum of
three bf16 numbers, and a product of two of these is exact in fp32. So three bf16 products of the
states' parts, added in fp32, are the fp32 product where weights are bf16 numbers, as published ones
are; six are for other weights. Gradients take one product: they go to a backbone in bf16, or to a
sum over thousands of rows.

Owns these products alone. Shapes: r rows, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PARTS = 3
"""bf16 numbers of 8 bits that an fp32 number of 24 bits is the sum of."""
SLICE_ROWS = 1 << 14
"""Rows of weights that are divided at once: a slice bounds the memory of fp32 remainders."""


def products_of(weight_VC: Tensor, *, backbone: torch.dtype | None) -> PartProducts | PlainProducts:
    """The fastest products for a weight in fp32 or wider; `backbone` is the type of autocast."""
    narrow = backbone == torch.bfloat16 and weight_VC.dtype == torch.float32
    return PartProducts(weight_VC) if narrow and weight_VC.is_cuda else PlainProducts(weight_VC)


class PlainProducts:
    """The products of a head with one weight matrix, in its own type."""

    def __init__(self, weight_VC: Tensor) -> None:
        self._weight_VC = weight_VC

    def logits(self, states_rC: Tensor) -> Tensor:
        """[r, V] of states in fp32."""
        return states_rC @ self._weight_VC.T

    def to_states(self, grad_rV: Tensor) -> Tensor:
        """[r, C] gradient of the states."""
        return grad_rV @ self._weight_VC

    def add_to_weight(self, total_VC: Tensor, grad_rV: Tensor, states_rC: Tensor) -> None:
        """Adds the gradient of the weight, in place."""
        total_VC.addmm_(grad_rV.T, states_rC)


class PartProducts:
    """As `PlainProducts`, in bf16 parts, added in fp32."""

    def __init__(self, weight_VC: Tensor) -> None:
        self._weights = _weight_parts(weight_VC)

    def logits(self, states_rC: Tensor) -> Tensor:
        """Products of all pairs of parts that are not below fp32's last bit, smallest first."""
        states = parts_of(states_rC, PARTS)
        total_rV: Tensor | None = None
        for order in reversed(range(PARTS)):
            for place, weight_VC in enumerate(self._weights[: order + 1]):
                total_rV = _product(states[order - place], weight_VC.T, total_rV)
        assert total_rV is not None
        return total_rV

    def to_states(self, grad_rV: Tensor) -> Tensor:
        """One product."""
        return _product(grad_rV.to(torch.bfloat16), self._weights[0], None)

    def add_to_weight(self, total_VC: Tensor, grad_rV: Tensor, states_rC: Tensor) -> None:
        """One product."""
        _product(grad_rV.to(torch.bfloat16).T, states_rC.to(torch.bfloat16), total_VC)


def parts_of(values: Tensor, count: int) -> list[Tensor]:
    """bf16 tensors, largest first, whose sum is `values` up to their last bit."""
    parts, left = [], values
    for _ in range(count):
        parts.append(left.to(torch.bfloat16))
        left = left - parts[-1]
    return parts


def _weight_parts(weight_VC: Tensor) -> Sequence[Tensor]:
    """The parts of a weight: one if it has bf16 numbers alone."""
    first_VC = weight_VC.to(torch.bfloat16)
    slices = [slice(at, at + SLICE_ROWS) for at in range(0, len(weight_VC), SLICE_ROWS)]
    differs = [(weight_VC[rows] != first_VC[rows]).any() for rows in slices]
    if not torch.stack(differs).any():
        return (first_VC,)
    others = [torch.empty_like(first_VC) for _ in range(PARTS - 1)]
    for rows in slices:
        for other, part in zip(others, parts_of(weight_VC[rows], PARTS)[1:], strict=True):
            other[rows] = part
    return (first_VC, *others)


def _product(one: Tensor, other: Tensor, total: Tensor | None) -> Tensor:
    """An fp32 product of bf16 matrices, added to `total` in place if there is one."""
    if not one.is_cuda:  # the same numbers: products of bf16 are exact in fp32
        one, other = one.float(), other.float()
        return one @ other if total is None else total.addmm_(one, other)
    if total is None:
        return torch.mm(one, other, out_dtype=torch.float32)
    return torch.addmm(total, one, other, out_dtype=torch.float32, out=total)
