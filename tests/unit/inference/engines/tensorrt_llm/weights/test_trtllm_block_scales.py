"""Tests: versions of a trainer reach an FP8 checkpoint with block scales in its form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from forge.core.named_tensor import NamedTensor
from services.inference.engines.base import UnfitWeights
from services.inference.engines.tensor_bytes import from_named
from services.inference.engines.tensorrt_llm.library.surface import Feature, surface_for
from services.inference.engines.tensorrt_llm.weights import buckets, worker_extension
from services.inference.engines.tensorrt_llm.weights.checkpoint import Checkpoint, read_checkpoint
from services.inference.engines.tensorrt_llm.weights.matrix_forms import BlockForm
from tests.contract.engines import published, reference
from tests.unit.inference.engines.tensorrt_llm.weights.test_trtllm_hub_names import model_of

NEW = frozenset({Feature.UPDATE_HOOKS})
BLOCK = 16, 24
"""It divides neither side of most matrices."""


def quantized(folder: Path, model: PreTrainedModel, **changed: object) -> Path:
    """A checkpoint whose linear layers are quantized, head and embedding not, as published ones."""
    model.save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    for name in [name for name in found if name.endswith("proj.weight")]:
        rows, columns = (
            -(-size // side) for size, side in zip(found[name].shape, BLOCK, strict=True)
        )
        found[name] = found[name].to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.ones(rows, columns)
    save_file(found, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        **changed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def checkpoint_of(folder: Path, model: PreTrainedModel, **changed: object) -> Checkpoint:
    return read_checkpoint(str(quantized(folder, model, **changed)), NEW)


def loaded(checkpoint: Checkpoint, tensors: dict[str, NamedTensor]) -> dict[str, torch.Tensor]:
    """The tensors that the library gets, in torch's types."""
    found = {}
    for one in checkpoint.fit(tensors, version=1).loaded():
        flat = torch.frombuffer(bytearray(one.data), dtype=torch.uint8)
        found[one.name] = flat.view(getattr(torch, one.dtype)).view(one.shape)
    return found


def restored(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights that a library computes with."""
    spread = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return matrix.float() * spread[: matrix.shape[0], : matrix.shape[1]]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("scale_fmt", ["", "ue8m0"])
def test_version_has_the_form_and_the_values_of_the_checkpoint(
    tmp_path: Path, family: str, scale_fmt: str
) -> None:
    """Also stacked experts. E4M3 keeps four significant bits, and steps of 2^-9 near zero."""
    model = reference("qwen3") if family == "qwen3" else model_of(family, seed=0)
    model.save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    checkpoint = checkpoint_of(tmp_path / "fp8", model, scale_fmt=scale_fmt)
    found = loaded(checkpoint, published(model))
    assert found.keys() == checkpoint.shapes.keys()
    for name, one in found.items():
        assert (str(one.dtype), tuple(one.shape)) == (
            f"torch.{checkpoint.types[name]}",
            checkpoint.shapes[name],
        )
        if name.endswith("_scale_inv"):
            continue
        if f"{name}_scale_inv" not in found:
            assert torch.equal(one, plain[name])
            continue
        scales = found[f"{name}_scale_inv"]
        spread = restored(torch.ones(one.shape), scales)
        error = (restored(one, scales) - plain[name]).abs()
        assert bool((error <= plain[name].abs() / 16 + spread * 2.0**-10).all()), name
        if scale_fmt:
            assert bool((scales.log2() == scales.log2().round()).all())
        else:
            assert float(one.float().abs().max()) == 448.0


def test_ranks_read_quantized_tensors_from_buckets(tmp_path: Path) -> None:
    """Bit for bit, over several buckets."""
    model = reference("qwen3")
    checkpoint = checkpoint_of(tmp_path, model)
    expected = loaded(checkpoint, published(model))
    found: dict[str, torch.Tensor] = {}
    with buckets.opened(str(tmp_path), bucket_bytes=1 << 12, needed_bytes=1 << 13) as folder:
        for bucket in folder.write(checkpoint.fit(published(model), version=1).loaded()):
            data = worker_extension._read(bucket)
            found |= worker_extension._tensors(data, bucket["tensors"], 0)
            folder.remove(bucket)
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert one.dtype == expected[name].dtype
        assert torch.equal(one.view(torch.uint8), expected[name].view(torch.uint8))


def test_scales_are_the_largest_weight_of_each_block() -> None:
    """Zeros and the smallest numbers stay, and no weight overflows."""
    matrix = torch.zeros(5, 7)
    matrix[0, 0], matrix[1, 5], matrix[4, 6], matrix[2, 3] = 4.48, -896.0, 1e-44, 3e38
    (parts,) = BlockForm(block=(2, 3), powers_of_two=False).narrowed([matrix])
    narrow, found = parts[""], parts["_scale_inv"]
    expected = torch.ones(3, 3)
    expected[0, 0], expected[0, 1], expected[1, 1] = 0.01, 2.0, 3e38 / 448
    torch.testing.assert_close(found, expected)
    assert narrow.float()[0, 0] == 448.0
    assert narrow.float()[1, 5] == -448.0
    assert narrow.float()[2, 3] == 448.0
    assert bool(narrow.float().isfinite().all())


def test_published_checkpoint_itself_passes_unchanged(tmp_path: Path) -> None:
    """Frozen weights: a fleet without a trainer."""
    folder = quantized(tmp_path, reference("qwen3"))
    checkpoint = read_checkpoint(str(folder), NEW)
    own = load_file(folder / "model.safetensors")
    tensors = {
        name: NamedTensor(
            name=name,
            dtype=checkpoint.types[name],
            shape=tuple(one.shape),
            data=one.contiguous().view(torch.uint8).numpy().tobytes(),
        )
        for name, one in own.items()
    }
    found = loaded(checkpoint, tensors)
    assert found.keys() == own.keys()
    assert all(
        torch.equal(one.view(torch.uint8), own[name].view(torch.uint8))
        for name, one in found.items()
    )


@pytest.mark.parametrize(
    "changed", [{"weight_block_size": None}, {"quant_method": "modelopt"}, {}], ids=repr
)
def test_other_forms_and_older_libraries_are_refused(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    """A scale for each tensor, other methods; 1.2.1 loads no parts of a quantized layer."""
    model = reference("qwen3")
    folder = quantized(tmp_path, model, **changed)
    features = NEW if changed else surface_for("1.2.1").features()
    with pytest.raises(UnfitWeights, match="nothing quantizes"):
        read_checkpoint(str(folder), features).fit(published(model), version=1)


def test_static_scales_of_activations_are_refused_by_name(tmp_path: Path) -> None:
    """A trainer has none."""
    model = reference("qwen3")
    folder = quantized(tmp_path, model, activation_scheme="static")
    found = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    save_file(found | {f"{name}.input_scale": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(UnfitWeights, match=rf"\(fp8: {name}.input_scale is a scale"):
        read_checkpoint(str(folder), NEW).fit(published(model), version=1)


def test_integers_are_not_quantized(tmp_path: Path) -> None:
    """They would be other numbers."""
    model = reference("qwen3")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = published(model)
    integers = replace(tensors[name], dtype="int32")
    with pytest.raises(UnfitWeights, match=rf"{name}.* is int32, .* has float8_e4m3fn"):
        checkpoint_of(tmp_path, model).fit(tensors | {name: integers}, version=1)


def test_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = reference("qwen3")
    tensors = published(model)
    name = "model.layers.0.mlp.down_proj.weight"
    wide = from_named(tensors[name])
    tensors[name] = NamedTensor(
        name=name, dtype="float32", shape=(wide.shape[1], wide.shape[0]), data=tensors[name].data
    )
    with pytest.raises(UnfitWeights, match=rf"{name}.* is \["):
        checkpoint_of(tmp_path, model).fit(tensors, version=1)
