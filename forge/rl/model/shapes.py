"""Whether saved tensors are those of a model, by names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def difference(own: Mapping[str, Tensor], found: Mapping[str, Sequence[int]]) -> str:
    """How the shapes found differ from those of `own` tensors, by the first; "" if they do not."""
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
