"""Weights on their way to vLLM's process: checked whole, then in memory without a name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from xxhash import xxh3_64_intdigest

from forge.core.errors import InvalidArgument
from forge.core.named_tensor import HubPart
from forge.rl.model import hub_names
from services.inference.engines.base import BrokenWeights, UnfitWeights
from services.inference.engines.tensor_bytes import from_bytes
from services.inference.engines.vllm import staging
from services.inference.engines.vllm.exchange.shared_memory import open_shared
from services.inference.engines.vllm.staging import Checkpoint, shared
from tests.contract.engines import CONFIGS, ROUTED, published, reference
from tests.support.inference.hub_parts import with_hub_names


def checkpoint(family: str, *, served: torch.dtype = torch.float32) -> Checkpoint:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config({**CONFIGS, "qwen3_moe": ROUTED}[family])
    return Checkpoint(model, served=served)


@pytest.mark.parametrize("family", CONFIGS)
def test_published_weights_are_staged_by_the_names_of_the_checkpoint(family: str) -> None:
    """Tied weights once, under their first name, whichever one was published; draft heads are left
    out."""
    weights = published(reference(family))
    if family == "qwen3":
        tied = weights.pop("model.embed_tokens.weight")
        weights["lm_head.weight"] = replace(tied, name="lm_head.weight")
    drafts = {"mtp.0.norm": next(iter(weights.values()))}
    staged = checkpoint(family).stage(weights | drafts, version=4)
    names = [tensor.name for tensor in staged.tensors]
    assert names == list(published(reference(family)))
    assert (staged.version, staged.rounded) == (4, False)


def test_16_bits_are_known_for_the_probe() -> None:
    """Published in 16 bits, or served in them."""
    weights = published(reference("llama"))
    half = published(reference("llama").to(torch.bfloat16))
    assert checkpoint("llama").stage(half, version=1).rounded
    assert checkpoint("llama", served=torch.bfloat16).stage(weights, version=1).rounded


def test_unfit_weights_are_refused_before_vllm_gets_them() -> None:
    """Of another shape, another set of names, or with NaN in one element."""
    weights = published(reference("llama"))
    name, tensor = next(iter(weights.items()))
    bent = {name: replace(tensor, shape=(tensor.shape[1], tensor.shape[0]))}
    broken = {name: replace(tensor, data=bytes(tensor.data)[:-4] + b"\xff" * 4)}
    with pytest.raises(UnfitWeights, match=name):
        checkpoint("llama").stage(weights | bent, version=2)
    with pytest.raises(UnfitWeights, match="missing"):
        checkpoint("llama").stage({name: tensor}, version=2)
    with pytest.raises(BrokenWeights, match=name):
        checkpoint("llama").stage(weights | broken, version=2)


def test_shared_memory_has_every_tensor_with_its_checksum() -> None:
    """By the path that another process opens; after the block the memory is gone."""
    weights = published(reference("qwen3"))
    staged = checkpoint("qwen3").stage(weights, version=1)
    with shared(staged) as update:
        with open_shared(update["address"]) as file:
            data = file.read()
        for name, dtype, shape, start, size, checksum in update["tensors"]:
            part = data[start : start + size]
            assert part == bytes(weights[name].data)
            assert (dtype, tuple(shape)) == (weights[name].dtype, weights[name].shape)
            assert xxh3_64_intdigest(part) == checksum
    with pytest.raises(OSError):
        open_shared(update["address"])


@pytest.mark.parametrize("named", [True, False])
def test_vllm_gets_experts_as_the_hub_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """One by one, as transformers saves them: vLLM's loaders read checkpoints of the hub. A stack
    is unknown to some of them. With the manifest's names nothing is converted."""
    model = reference("qwen3_moe")
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    weights = published(model)
    assert expected.keys() != weights.keys()
    chosen = checkpoint("qwen3_moe")
    described = [(name, "float32", list(one.shape)) for name, one in expected.items()]
    assert sorted(chosen.tensors) == sorted(described)
    if named:
        weights = with_hub_names(model, weights)
        monkeypatch.setattr(hub_names, "revert_weight_conversion", None)
    with (
        shared(chosen.stage(weights, version=1)) as update,
        open_shared(update["address"]) as file,
    ):
        data = file.read()
    found = {
        name: from_bytes(data[start : start + size], dtype=dtype, shape=tuple(shape))
        for name, dtype, shape, start, size, _ in update["tensors"]
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("change", ["name", "shape"])
def test_names_of_the_manifest_that_no_load_was_tried_with_are_not_loaded(change: str) -> None:
    """A trainer with another version of transformers may have others than the start has tried."""
    model = reference("qwen3_moe")
    weights = with_hub_names(model, published(model))
    name = next(name for name in weights if name.endswith("experts.down_proj"))
    (part,) = weights[name].hub
    rows, columns = part.shape
    other = part._replace(name=part.name.replace("experts", "mlp"))
    if change == "shape":
        other = part._replace(shape=(columns, rows))
    weights[name] = replace(weights[name], hub=(other,))
    chosen = checkpoint("qwen3_moe")
    loaded = {one.name: one for one in chosen.stage(weights, version=1).loaded()}
    assert [(key, list(one.shape)) for key, one in sorted(loaded.items())] == [
        (key, shape) for key, _, shape in sorted(chosen.tensors)
    ]


def test_tied_weights_under_their_second_name_are_converted() -> None:
    """The names of the manifest are those of the published name."""
    model = reference("qwen3")
    weights = published(model)
    tied = weights.pop("model.embed_tokens.weight")
    weights["lm_head.weight"] = replace(tied, name="lm_head.weight")
    weights = {name: replace(one, hub=(HubPart(name, one.shape),)) for name, one in weights.items()}
    loaded = [one.name for one in checkpoint("qwen3").stage(weights, version=1).loaded()]
    assert sorted(loaded) == sorted(published(model))


def test_model_without_a_way_back_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may know them; the log has the reason. A manifest with names needs none."""

    def refuses(_: object) -> None:
        raise InvalidArgument("no way back")

    checkpoint_names = checkpoint("qwen3_moe").tensors
    monkeypatch.setattr(staging, "HubNames", refuses)
    weights = published(reference("qwen3_moe"))
    chosen = checkpoint("qwen3_moe")
    assert [name for name, *_ in chosen.tensors] == [*weights]
    assert [one.name for one in chosen.stage(weights, version=1).loaded()] == [*weights]
    named = with_hub_names(reference("qwen3_moe"), weights)
    loaded = {one.name for one in chosen.stage(named, version=1).loaded()}
    assert loaded == {name for name, *_ in checkpoint_names}
