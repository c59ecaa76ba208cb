"""Names and shapes of the hub, layer by layer, by the rules of the installed transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from forge.core.errors import InvalidArgument
from forge.rl.model import hub_names
from forge.rl.model.hub_names import HubNames
from tests.support.rl.models import tiny_model


def without_memory(model: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "llama"])
def test_layers_apart_are_converted_as_the_model_at_once(family: str) -> None:
    """The rules need a configuration alone."""
    model = tiny_model(family, torch.float32)
    own = dict(model.state_dict())
    names = HubNames(without_memory(model))
    expected = revert_weight_conversion(model, own)
    found = dict(names.converted(own, own.__getitem__))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert all(one.is_contiguous() for one in found.values())
    assert names.own == (family in ("gpt_oss", "llama"))


def test_one_layer_is_read_at_a_time() -> None:
    """So a large model needs the memory of one layer. What stays as it is is not copied."""
    model = tiny_model("mixtral", torch.float32)
    own: dict[str, Tensor] = dict(model.state_dict())
    read: list[str] = []

    def reading(name: str) -> Tensor:
        read.append(name)
        return own[name]

    tensors = HubNames(without_memory(model)).converted(own, reading)
    name, first = next(tensors)
    assert read == [name] and first is own[name]
    for name, _ in tensors:
        if ".experts." in name:
            break
    assert {one for one in read if ".layers.0." in one} == {
        one for one in own if ".layers.0." in one
    }
    assert not [one for one in read if ".layers.1." in one]


def test_conversion_without_a_way_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one that joins tensors of several layers."""
    model = without_memory(tiny_model("mixtral", torch.float32))

    def refuses(*_: Any) -> Any:
        raise NotImplementedError

    def joins(_: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"all": next(iter(tensors.values()))}

    monkeypatch.setattr(hub_names, "revert_weight_conversion", refuses)
    with pytest.raises(InvalidArgument, match=r"no way back .* MixtralForCausalLM: NotImpl"):
        HubNames(model)
    monkeypatch.setattr(hub_names, "revert_weight_conversion", joins)
    with pytest.raises(InvalidArgument, match="join several layers"):
        HubNames(model)
