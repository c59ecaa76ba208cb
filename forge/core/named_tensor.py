"""A tensor in host memory, as published, fetched and loaded; names of its types."""

from __future__ import annotations

from dataclasses import dataclass

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's names of the types in safetensors files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A dense array and its name."""

    name: str
    dtype: str
    """As torch names it, without `torch.`: "bfloat16"."""
    shape: tuple[int, ...]
    data: bytes | memoryview
    """Little-endian, C order; one byte an item. Never changes."""
