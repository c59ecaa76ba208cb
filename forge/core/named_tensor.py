"""A tensor in host memory, as published, fetched and loaded. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A dense array and its name."""

    name: str
    dtype: str
    """As torch names it, without `torch.`: "bfloat16"."""
    shape: tuple[int, ...]
    data: bytes | memoryview
    """Little-endian, C order; one byte an item. Never changes."""
