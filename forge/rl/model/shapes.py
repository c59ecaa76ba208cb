"""Compares saved tensors with those of a model, by names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def difference(own: Mapping[str, Tensor], found: Mapping[str, Sequence[int]]) -> str:
    """The first difference between the shapes found and those of `own` tensors; "" if none."""
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    given = {name: tuple(shape) for name, shape in found.items()}
    odd = [name for name in {**expected, **given} if expected.get(name) != given.get(name)]
    if not odd:
        return ""
    return (
        f"{odd[0]} is {given.get(odd[0], 'missing')}, "
        f"{expected.get(odd[0], 'not there')} in this run "
        f"({len(odd)} of {len(expected)} tensors differ)"
    )
