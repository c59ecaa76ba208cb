"""Converts tensors to bytes and back, without a copy where the memory layout allows it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from forge.core.named_tensor import NamedTensor
from services.inference.engines.base import UnfitWeights

# Tensors of received bytes are never written.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the data, little-endian, in C order; one copy."""
    flat = tensor.cpu().view(torch.uint8) if tensor.dim() else tensor.cpu().reshape(1)
    return flat.view(torch.uint8).numpy().tobytes()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the data of a contiguous tensor in host memory, not copied."""
    data: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def from_bytes(data: bytes | memoryview, *, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a read-only view of `data`. Raises UnfitWeights when size and shape disagree."""
    if dtype not in DTYPES:
        raise UnfitWeights(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    kind = DTYPES[dtype]
    expected = torch.Size(shape).numel() * kind.itemsize
    if len(data) != expected:
        raise UnfitWeights(f"{len(data)} bytes do not fill {dtype} {list(shape)}: {expected}")
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).view(shape)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. Reads the tensor once: a finite sum proves it."""
    if bool(tensor.sum(dtype=torch.float32).isfinite()):
        return True
    # The sum of finite elements may overflow.
    return bool(tensor.isfinite().all())


def from_named(tensor: NamedTensor) -> torch.Tensor:
    """Return a read-only view of a received tensor."""
    return from_bytes(tensor.data, dtype=tensor.dtype, shape=tensor.shape)


def to_named(name: str, tensor: torch.Tensor) -> NamedTensor:
    """Return a tensor as a trainer publishes it."""
    return NamedTensor(
        name=name,
        dtype=NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        data=to_bytes(tensor.detach().contiguous()),
    )
