"""Types of published weights, before an engine touches what it serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.inference.engines.base import UnfitWeights
from services.inference.engines.tensor_bytes import to_named
from services.inference.engines.weight_checks import match_names

NAMES = ("embed", "norm", "head")


def test_tensor_under_another_type_of_16_bits_is_refused() -> None:
    """Each one by itself, with both types and a tensor of each; float32 beside 16 bits is usual."""
    published = {name: to_named(name, torch.ones(4, dtype=torch.bfloat16)) for name in NAMES}
    published["norm"] = to_named("norm", torch.ones(4))
    weights = [(name,) for name in NAMES]
    assert match_names(weights, published, version=3) == list(NAMES)
    for name in ("embed", "head"):
        other = "head" if name == "embed" else "embed"
        mislabelled = {**published, name: replace(published[name], dtype="float16")}
        with pytest.raises(UnfitWeights, match=f"{other} is bfloat16 and {name} is float16"):
            match_names(weights, mislabelled, version=3)
