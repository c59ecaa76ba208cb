"""Tensors as a worker receives them from a trainer that publishes the hub's names, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.core.named_tensor import NamedTensor
from forge.rl.model.hub_names import HubNames
from forge.runtime.weights import TensorEntry, WeightManifest


def with_hub_names(model: Any, tensors: Mapping[str, NamedTensor]) -> dict[str, NamedTensor]:
    """Through the manifest of a version with the tensors of a model."""
    shapes = {name: one.shape for name, one in tensors.items()}
    entries = tuple(map(TensorEntry.of, tensors.values()))
    manifest = WeightManifest(
        weight_version=1, tensors=entries, hub=HubNames(model).parts(shapes)
    ).encode()
    received = WeightManifest.decode(manifest).with_hub_names(tensors.values())
    return {one.name: one for one in received}
