"""Weights under the names of the model of transformers, and their way to those of a checkpoint.

A trainer publishes the model's own names: transformers stacks experts and renames modules of some
families as it loads them. Imports torch and transformers, which hosts without an engine lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import torch

from forge.core.errors import InvalidArgument
from forge.core.named_tensor import NamedTensor
from forge.rl.model.hub_names import HubNames
from services.inference.engines.meta_model import meta_model
from services.inference.engines.tensor_bytes import NAMES, from_named, raw_bytes
from services.inference.engines.weight_checks import check_tensor, match_names, weights_of


class OwnNames:
    """Names, shapes and ties of the model of transformers, and its way to the hub's names."""

    def __init__(self, model_path: str) -> None:
        """Raises `InvalidArgument` for a model that transformers cannot build, or cannot write as
        it reads it."""
        try:
            model = meta_model(model_path)
        except (ImportError, KeyError, OSError, ValueError) as error:
            raise InvalidArgument(f"transformers cannot build the model: {error}") from error
        self._hub = HubNames(model)
        self._weights = weights_of(model)

    @property
    def differ(self) -> bool:
        """Whether a checkpoint has other names or shapes."""
        return not self._hub.own

    def fit(self, tensors: Mapping[str, NamedTensor], *, version: int) -> dict[str, NamedTensor]:
        """Return the tensors by the first name of each; tied ones may have any or all of theirs.
        Raises `UnfitWeights` for other names, types or shapes."""
        found = {}
        names = match_names([one.names for one in self._weights], tensors, version=version)
        for name, weight in zip(names, self._weights, strict=True):
            own, first = weight.tensor, weight.names[0]
            check_tensor(tensors[name], shape=own.shape, dtype=own.dtype, version=version)
            found[first] = replace(tensors[name], name=first)
        return found

    def stored(self, tensors: Mapping[str, NamedTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return type and shape by name, as a checkpoint has these tensors. Reads no data."""
        shapes = {
            name: torch.empty(one.shape, dtype=from_named(one).dtype, device="meta")
            for name, one in tensors.items()
        }
        found = self._hub.converted(shapes, shapes.__getitem__)
        return {name: (NAMES[one.dtype], tuple(one.shape)) for name, one in found}

    def converted(self, tensors: Mapping[str, NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the tensors as a checkpoint has them. What differs is copied, one layer at a
        time."""
        for name, one in self._hub.converted(tensors, lambda name: from_named(tensors[name])):
            yield NamedTensor(
                name=name, dtype=NAMES[one.dtype], shape=tuple(one.shape), data=raw_bytes(one)
            )


@cache
def own_names(model_path: str) -> OwnNames:
    """Return the names of a model; see `OwnNames`."""
    return OwnNames(model_path)
