"""Tests: the tensors of the hub are found as ranges of a model's own, whatever the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.support.inference.model_families import families
from forge.core.errors import InvalidArgument
from forge.core.named_tensor import HubPart
from forge.rl.model import hub_names
from forge.rl.model.hub_names import HubNames
from forge.rl.model.small_config import small_config
from services.inference.engines.tensor_bytes import from_named, to_named
from tests.support.inference.hub_parts import with_hub_names
from tests.support.rl.models import tiny_model

JOINED_OR_INTERLEAVED = {"hrm_text", "inkling2_text"}
"""The families of transformers whose tensors on the hub are no ranges."""


def small_models() -> dict[str, Any]:
    """A model without data of each family that transformers builds."""
    models = {}
    for family in families():
        try:
            with torch.device("meta"):
                config = small_config(family.config())
                models[family.name] = AutoModelForCausalLM.from_config(config)
        except Exception:  # nothing is known of a family that transformers cannot build
            continue
    return models


def random_like(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=torch.bfloat16)
    return torch.randint(100, tensor.shape, dtype=tensor.dtype)


def test_views_equal_the_conversion_in_every_family() -> None:
    """Bit for bit, on random values; with the exceptions of this release of transformers."""
    converted, refused = set(), set()
    for family, model in small_models().items():
        names = HubNames(model)
        own = {name: random_like(one) for name, one in model.state_dict().items()}
        tensors = {name: to_named(name, one) for name, one in own.items()}
        try:
            received = with_hub_names(model, tensors)
        except InvalidArgument:
            refused.add(family)
            continue
        views = {view.name: view for one in received.values() for view in one.in_hub_names()}
        expected = dict(names.converted(own, own.__getitem__))
        assert views.keys() == expected.keys(), family
        for name, one in expected.items():
            found = from_named(views[name])
            assert found.dtype == one.dtype and torch.equal(found, one), (family, name)
        if not names.own:
            converted.add(family)
    assert {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_neox", "nemotron_h"} <= converted
    assert refused <= JOINED_OR_INTERLEAVED


def test_experts_of_a_stack_are_one_part() -> None:
    """So the manifest of a model of many experts stays small; what has its own name is left out."""
    model = tiny_model("qwen3_moe", torch.float32)
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    shapes = {name: one.shape for name, one in model.state_dict().items()}
    experts, rows, channels = shapes[stack]
    parts = HubNames(model).parts(shapes)
    name, shape, step = "model.layers.0.mlp.experts.{}.", (rows // 2, channels), rows * channels
    assert parts[stack] == (
        HubPart(f"{name}gate_proj.weight", shape, 0, step, experts),
        HubPart(f"{name}up_proj.weight", shape, step // 2, step, experts),
    )
    assert all(".experts." in name for name in parts)


def flipped(one: Tensor) -> Tensor:
    return one.flip(-1)


def negated(one: Tensor) -> Tensor:
    return -one


def shifted(one: Tensor) -> Tensor:
    return one + 1


def rolled(one: Tensor) -> Tensor:
    return one.roll(1, 0)


def halved(one: Tensor) -> Tensor:
    return one[: len(one) // 2]


def as_float(one: Tensor) -> Tensor:
    return one * 1.0


def swapped(one: Tensor) -> Tensor:
    return one.T if one.dim() == 2 else one


@pytest.mark.parametrize("changed", [flipped, negated, shifted, rolled, halved, as_float, swapped])
def test_other_values_are_no_ranges(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[[Tensor], Tensor]
) -> None:
    """Also where names and shapes are those of the model, and where only the type differs."""
    model = tiny_model("llama", torch.float32)

    def reverts(_: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: changed(one) for name, one in tensors.items()}

    monkeypatch.setattr(hub_names, "revert_weight_conversion", reverts)
    with pytest.raises(InvalidArgument, match="tensors of the hub are no ranges: "):
        HubNames(model).parts({name: one.shape for name, one in model.state_dict().items()})


def test_tensors_of_another_model_have_no_parts() -> None:
    """Or of another shape: the names of a manifest must be those of its tensors."""
    names = HubNames(tiny_model("llama", torch.float32))
    for shapes in ({"other": (2, 2)}, {"model.norm.weight": (1,)}):
        with pytest.raises(InvalidArgument, match="is not in the model"):
            names.parts(shapes)
