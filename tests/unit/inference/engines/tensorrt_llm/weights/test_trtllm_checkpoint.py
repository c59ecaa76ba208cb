"""Tests: which weights fit the checkpoint that the library has loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from forge.core.errors import ConfigError
from forge.core.named_tensor import NamedTensor
from services.inference.engines.base import UnfitWeights
from services.inference.engines.tensor_bytes import from_named, to_named
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.weights.checkpoint import read_checkpoint
from tests.contract.engines import published, reference, with_heads
from tests.support.inference.tensorrt_llm import started
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour


def stored(folder: Path, model: PreTrainedModel) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("wrong", ["another model", "two tensors"])
async def test_first_version_must_be_of_the_checkpoint(
    behaviour: Behaviour, model_path: Path, wrong: str
) -> None:
    """The library would ignore unknown names and keep what it does not get."""
    other = published(reference("llama"))
    some = dict(list(published(reference("qwen3")).items())[:2])
    async with started(model_path, Role.BOTH) as engine:
        with pytest.raises(UnfitWeights, match=r"tensors are missing \(.+\), \d+ are unknown"):
            await engine.load(other if wrong == "another model" else some, version=1)
        assert engine.status().version == 0


def test_model_without_weights_is_refused(tmp_path: Path) -> None:
    """The library could not start, either."""
    reference("qwen3").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no \*.safetensors"):
        read_checkpoint(str(tmp_path))


def test_floats_may_have_another_width(tmp_path: Path) -> None:
    """The library casts them; integers in their place would be other numbers."""
    checkpoint = read_checkpoint(stored(tmp_path, reference("qwen3")))
    half = published(reference("qwen3", seed=1).half())
    assert checkpoint.fit(half, version=2).tensors == half
    integers = {name: replace(one, dtype="int32") for name, one in published_(1).items()}
    with pytest.raises(UnfitWeights, match="is int32, the checkpoint in model_path has float32"):
        checkpoint.fit(integers, version=2)


def published_(seed: int) -> dict[str, NamedTensor]:
    return published(reference("qwen3", seed=seed))


def test_tied_head_may_come_by_its_own_name(tmp_path: Path) -> None:
    """The checkpoint has it once. A head with other numbers is of another model."""
    checkpoint = read_checkpoint(stored(tmp_path, reference("qwen3")))
    tensors = published_(1)
    embedding = tensors["model.embed_tokens.weight"]
    head = replace(embedding, name="lm_head.weight")
    assert checkpoint.fit(tensors | {head.name: head}, version=1).tensors == tensors
    own = replace(head, data=bytes(len(head.data)))
    with pytest.raises(UnfitWeights, match=r"1 are unknown \(lm_head.weight\)"):
        checkpoint.fit(tensors | {head.name: own}, version=1)


def test_draft_heads_are_left_out(tmp_path: Path) -> None:
    """The library has none of Forge's."""
    checkpoint = read_checkpoint(stored(tmp_path, reference("qwen3")))
    assert checkpoint.fit(with_heads(published_(0)), version=1).tensors == published_(0)


def test_drafting_layers_of_a_checkpoint_may_be_missing(tmp_path: Path) -> None:
    """A trainer does not have them. One of its own layers must not be missing."""
    model = reference("qwen3")
    model.save_pretrained(tmp_path)
    layers = model.config.num_hidden_layers
    more = {
        f"model.layers.{layers}.eh_proj.weight": torch.ones(4, 4),
        "mtp.fc.weight": torch.ones(4),
    }
    save_file(more, tmp_path / "model-mtp.safetensors")
    checkpoint = read_checkpoint(str(tmp_path))
    tensors = published_(0)
    assert checkpoint.fit(tensors, version=1).tensors == tensors
    last = f"model.layers.{layers - 1}.input_layernorm.weight"
    with pytest.raises(UnfitWeights, match=rf"1 tensors are missing \({last}\)"):
        checkpoint.fit({name: one for name, one in tensors.items() if name != last}, version=1)


def test_stacked_experts_get_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """A trainer publishes the experts of a layer as one tensor, a checkpoint has each by itself:
    the library would ignore the stack and keep the old experts."""
    model = reference("qwen3_moe")
    tensors = published(model)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    fitting = read_checkpoint(stored(tmp_path, model)).fit(tensors, version=1)
    fitted = {one.name: one for one in fitting.loaded()}
    saved = load_file(tmp_path / "model.safetensors")
    assert fitted.keys() == saved.keys()
    assert all(torch.equal(from_named(one), saved[name]) for name, one in fitted.items())


def test_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    """An expert less, or two axes."""
    model = reference("qwen3_moe")
    checkpoint = read_checkpoint(stored(tmp_path, model))
    tensors = published(model)
    name = "model.layers.0.mlp.experts.down_proj"
    whole = from_named(tensors[name])
    for wrong in (whole[1:], whole.flatten(0, 1), whole.transpose(1, 2)):
        with pytest.raises(UnfitWeights, match=r"model\.layers\.0\.mlp\.experts\."):
            checkpoint.fit(tensors | {name: to_named(name, wrong)}, version=1)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_quantized_checkpoint_takes_no_unquantized_weights(tmp_path: Path, file: str) -> None:
    """The library would cast them without a scale. The error names the quantization."""
    model = reference("qwen3")
    model.save_pretrained(tmp_path)
    tensors = published(model)
    name = "model.layers.0.mlp.down_proj.weight"
    narrow = {
        name: from_named(tensors[name]).to(torch.float8_e4m3fn),
        f"{name}_scale": torch.ones(1),
    }
    rest = {key: from_named(one).clone() for key, one in tensors.items() if key != name}
    save_file(rest | narrow, tmp_path / "model.safetensors")
    if file == "config.json":
        config = json.loads((tmp_path / file).read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
    else:
        config = {"quantization": {"quant_algo": "fp8"}}
    (tmp_path / file).write_text(json.dumps(config))
    checkpoint = read_checkpoint(str(tmp_path))
    with pytest.raises(UnfitWeights, match=r"quantized \(fp8\), and nothing quantizes"):
        checkpoint.fit(tensors, version=1)
    scale = {f"{name}_scale": to_named(f"{name}_scale", torch.ones(1))}
    with pytest.raises(UnfitWeights, match=r"is float32, .* has float8_e4m3fn.*quantized \(fp8\)"):
        checkpoint.fit(tensors | scale, version=1)
