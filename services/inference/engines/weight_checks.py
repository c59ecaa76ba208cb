"""Compares published tensors with the model's own, by name, before an engine changes weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from forge.core.named_tensor import NamedTensor
from services.inference.engines.base import UnfitWeights
from services.inference.engines.tensor_bytes import NAMES, from_named

DRAFT_PREFIX = "mtp."
"""Begins the names of draft heads, which are no weights of the model."""
_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeight:
    """A parameter or persistent buffer of a model."""

    names: tuple[str, ...]
    """Several names for tied weights."""
    tensor: torch.Tensor


def weights_of(model: torch.nn.Module) -> tuple[ModelWeight, ...]:
    """Return every parameter and persistent buffer once, in the model's order."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple(ModelWeight(names=tuple(names[key]), tensor=tensors[key]) for key in tensors)


def match_names(
    weights: Sequence[Sequence[str]], tensors: Mapping[str, NamedTensor], *, version: int
) -> list[str]:
    """Return the published name of each weight; tied weights may have any or all of their names.

    Draft heads are left out. Raises UnfitWeights for missing and unknown names, and for two types
    of 16 bits: one of them would be read as the other.
    """
    _check_narrow_types(tensors, version=version)
    known = {name for names in weights for name in names}
    unknown = sorted(
        name for name in tensors if name not in known and not name.startswith(DRAFT_PREFIX)
    )
    missing = [names[0] for names in weights if not any(name in tensors for name in names)]
    if missing or unknown:
        raise UnfitWeights(
            f"weights {version} are of another model: missing {missing[:3]}, "
            f"unknown {unknown[:3]} ({len(missing)} and {len(unknown)} in all)"
        )
    return [next(name for name in names if name in tensors) for names in weights]


def _check_narrow_types(tensors: Mapping[str, NamedTensor], *, version: int) -> None:
    """A trainer has one such type; the probe may not notice one tensor of another."""
    first: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in _NARROW and not name.startswith(DRAFT_PREFIX):
            first.setdefault(tensor.dtype, name)
    if len(first) > 1:
        places = " and ".join(f"{name} is {dtype}" for dtype, name in sorted(first.items()))
        raise UnfitWeights(f"weights {version} have two types of 16 bits: {places}")


def check_tensor(
    received: NamedTensor, *, shape: torch.Size, dtype: torch.dtype, version: int
) -> torch.Tensor:
    """Return a read-only view of a tensor. Raises UnfitWeights for another shape than the model's,
    and for another type, unless both are floats."""
    tensor = from_named(received)
    if tensor.shape != shape:
        raise UnfitWeights(
            f"weights {version}: {received.name} is {list(tensor.shape)}, "
            f"this model has {list(shape)}"
        )
    floats = tensor.is_floating_point() and dtype.is_floating_point
    if not floats and tensor.dtype != dtype:
        raise UnfitWeights(
            f"weights {version}: {received.name} is {received.dtype}, this model has {NAMES[dtype]}"
        )
    return tensor
