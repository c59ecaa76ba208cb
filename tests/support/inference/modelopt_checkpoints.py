"""Quantized checkpoints in the form of ModelOpt, by another arithmetic than the engine's: a number
becomes the nearest of all values of its type, ties the one with an even code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ALGORITHMS = ("FP8", "NVFP4")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EVEN_LAST = (1, 3, 5, 7, 0, 2, 4, 6)
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Projections that the library makes one matrix of."""
_LINEAR = ("proj", "w1", "w2", "w3")


def save_quantized(
    folder: Path, model: PreTrainedModel, algorithm: str, *, scalar: tuple[int, ...] = ()
) -> Path:
    """Write a checkpoint: linear layers are quantized where 16 divides their columns, head,
    embedding and the rest not. Keys and values have scales. `scalar`: shape of a scale."""
    model.save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    found = dict(plain)
    for number, name in enumerate(quantized_names(plain)):
        module = name.removesuffix(".weight")
        fused = fused_with(name, plain)
        largest = max(plain[one].float().abs().max() for one in fused)
        quantize = _fp8 if algorithm == "FP8" else _nvfp4
        parts = quantize(plain[name].float(), largest)
        first = quantized_names(plain).index(fused[0])
        parts["input_scale"] = torch.tensor(0.01 + first / 1024)
        if module.endswith(("k_proj", "v_proj")):
            parts[f"{module[-6]}_scale"] = torch.tensor(0.5 + number / 1024)
        for part, tensor in parts.items():
            found[f"{module}.{part}"] = tensor if tensor.dim() else tensor.reshape(scalar)
    save_file(found, folder / "model.safetensors")
    set_quantization(folder, {"quant_method": "modelopt", "quant_algo": algorithm})
    return folder


def set_quantization(folder: Path, quantization: dict[str, Any]) -> None:
    """Change the configuration."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def quantized_names(plain: dict[str, torch.Tensor]) -> list[str]:
    """The matrices to quantize."""
    return [
        name
        for name, tensor in plain.items()
        if name.removesuffix(".weight").endswith(_LINEAR) and tensor.shape[-1] % 16 == 0
    ]


def fused_with(name: str, plain: dict[str, torch.Tensor]) -> list[str]:
    """The quantized matrices that share a scale with one, itself among them."""
    before, projection = name.removesuffix(".weight").rsplit(".", 1)
    group = next((group for group in _FUSED if projection in group), (projection,))
    names = quantized_names(plain)
    return [one for last in group if (one := f"{before}.{last}.weight") in names]


def restored(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that a library computes with, in float32, by the names of the plain
    checkpoint."""
    plain = {}
    for name, tensor in found.items():
        if name.endswith(("_scale", "_scale_2")):
            continue
        plain[name] = tensor.float()
        if f"{name}_scale_2" in found:
            codes = torch.stack([tensor & 15, tensor >> 4], -1).flatten(1).int()
            values = torch.cat([E2M1, -E2M1])[codes]
            scales = found[f"{name}_scale"].float() * found[f"{name}_scale_2"]
            plain[name] = values * scales.repeat_interleave(16, 1)
        elif f"{name}_scale" in found:
            plain[name] = tensor.float() * found[f"{name}_scale"]
    return plain


def nearest_codes(numbers: torch.Tensor) -> torch.Tensor:
    """The E2M1 codes of numbers."""
    distances = (numbers.abs()[..., None] - E2M1).abs()
    codes = torch.zeros(numbers.shape, dtype=torch.uint8)
    for code in _EVEN_LAST:
        codes[distances[..., code] == distances.amin(-1)] = code
    return codes + 8 * (numbers < 0).to(torch.uint8)


def _fp8(matrix: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = largest / 448
    return {"weight": (matrix / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _nvfp4(matrix: torch.Tensor, largest: torch.Tensor) -> dict[str, torch.Tensor]:
    whole = largest / (6 * 448)
    blocks = matrix.reshape(len(matrix), -1, 16)
    scales = (blocks.abs().amax(-1) / (6 * whole)).to(torch.float8_e4m3fn)
    codes = nearest_codes(blocks / (scales.float() * whole)[..., None]).reshape(matrix.shape)
    return {
        "weight": codes[:, 0::2] + 16 * codes[:, 1::2],
        "weight_scale": scales,
        "weight_scale_2": whole,
    }
