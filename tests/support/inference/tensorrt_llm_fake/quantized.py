"""Layers quantized by ModelOpt, as the library takes and computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import torch

from tests.support.inference.tensorrt_llm_fake.behaviour import misuse

NARROW = (torch.float8_e4m3fn, torch.uint8)
"""Types of quantized matrices, and of their scales."""
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def computed(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the model: the quantized ones restored, their scales left out."""
    found = dict(stored)
    for name in _matrices(stored):
        scales = found.pop(f"{name}_scale").float()
        matrix = found[name]
        if matrix.dtype == torch.uint8:
            low, high = matrix & 15, matrix >> 4
            codes = torch.stack([low, high], -1).flatten(1).int()
            scales = (scales * found.pop(f"{name}_scale_2")).repeat_interleave(16, 1)
            found[name] = torch.cat([_VALUES, -_VALUES])[codes] * scales
        else:
            found[name] = matrix.float() * scales
    ends = (".input_scale", ".k_scale", ".v_scale")
    return {name: tensor for name, tensor in found.items() if not name.endswith(ends)}


def check_update(stored: Mapping[str, torch.Tensor], sent: Set[str]) -> None:
    """Raise what the library asserts of an update, or computes garbage from."""
    for name in _matrices(stored):
        module = name.removesuffix(".weight")
        parts = {one for one in stored if one.rpartition(".")[0] == module}
        if not parts <= sent:
            raise misuse(f"an update lacks {sorted(parts - sent)}")
        before, _, last = module.rpartition(".")
        for group in _FUSED:
            if last in group and stored[name].dtype == torch.uint8:
                _check_equal(stored, [f"{before}.{one}" for one in group])


def _check_equal(stored: Mapping[str, torch.Tensor], modules: list[str]) -> None:
    for part in ("input_scale", "weight_scale_2"):
        values = {float(stored[f"{one}.{part}"]) for one in modules if f"{one}.{part}" in stored}
        if len(values) > 1:
            raise misuse(f"{part} should be the same for all of {modules}")


def _matrices(stored: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, tensor in stored.items():
        if tensor.dtype in NARROW and name.endswith(".weight"):
            yield name
