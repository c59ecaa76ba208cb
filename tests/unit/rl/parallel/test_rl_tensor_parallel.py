"""Which models ranks can divide by layers; `test_rl_ranks` computes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from forge.core.errors import InvalidArgument
from forge.rl.parallel.sharding import named_layers
from forge.rl.parallel.tensor_parallel import Division
from tests.support.rl.models import SHAPE, tiny_model


def division(model: Any, ranks: int = 2) -> Division:
    return Division(model, named_layers(model), ranks)


def llama(**sizes: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | sizes)))


class Packed(nn.Linear):
    """A linear layer whose weight has another layout, like a quantized one."""


def packed() -> Any:
    model = llama()
    model.model.layers[1].mlp.up_proj = Packed(16, 24)
    return model


def with_further_embedding() -> Any:
    model = llama()
    model.model.further = nn.Embedding(3, 16)
    return model


def without_plan() -> Any:
    model = llama()
    model.tp_plan = {}
    return model


def with_style(name: str, style: str) -> Any:
    model = llama()
    model._tp_plan[name] = style
    return model


@pytest.mark.parametrize(
    ("model", "ranks", "reason"),
    [
        (llama(), 4, "num_key_value_heads = 2 is not a multiple of it; use mesh.tp = 2"),
        (llama(), 3, "num_attention_heads = 4 is not a multiple of it; use mesh.dp_shard and"),
        (llama(intermediate_size=25), 2, "out_features = 25 of model.layers.0.mlp.gate_proj"),
        (packed(), 2, "model.layers.1.mlp.up_proj is a Packed, not a plain linear layer"),
        (with_further_embedding(), 2, "model.further.weight is outside of its layers"),
        (without_plan(), 2, "transformers has no tensor-parallel plan for its layers"),
        (tiny_model("mamba", torch.float32), 2, "transformers has no tensor-parallel plan"),
        (
            with_style("model.layers.*.input_layernorm", "sequence_parallel"),
            2,
            "its plan has sequence_parallel for model.layers.0.input_layernorm, which is not built",
        ),
        (
            with_style("model.layers.*.input_layernorm.weight", "colwise"),
            2,
            "divides model.layers.0.input_layernorm.weight alone",
        ),
    ],
)
def test_model_that_ranks_cannot_divide_is_refused(model: Any, ranks: int, reason: str) -> None:
    """In one line with the setting, the model and the value."""
    with pytest.raises(InvalidArgument) as caught:
        division(model, ranks)
    said = str(caught.value)
    family = type(model).__name__
    assert said.startswith(f"mesh.tp = {ranks} is not allowed for {family}: ") and reason in said
    assert "\n" not in said


def test_experts_are_divided_by_their_plan() -> None:
    """Of every family with fused experts and a plan."""
    for family in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe_lite"):
        found = division(tiny_model(family, torch.float32))
        assert found.whole_experts == "", family
        assert found._experts, family


def test_experts_that_ranks_cannot_divide_stay_whole() -> None:
    """Their number is not a multiple, or transformers has no plan: the rest is divided."""
    model = tiny_model("qwen3_moe", torch.float32)
    for layer in model.model.layers:
        layer.mlp.experts.num_experts = 3
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            setattr(layer.mlp.experts, name, nn.Parameter(weight[:3].detach()))
    found = division(model)
    assert found.whole_experts == "3 experts are not a multiple of it"
    assert not found._experts and "model.layers.0.self_attn.q_proj" in found._rules
    assert not any("experts" in name for name in found._rules)

    model = tiny_model("qwen3_moe", torch.float32)
    model._ep_plan = {}
    found = division(model)
    assert "no expert plan for model.layers.*.mlp.experts" in found.whole_experts
    assert not found._experts and found._rules
