"""A tensor in host memory, as published, fetched and loaded; names of its types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


class HubPart(NamedTuple):
    """Tensors of a checkpoint on the hub that are ranges of a tensor; in JSON an array of these
    fields."""

    name: str
    """Of the only one, or with `{}` in place of the number of each, from 0."""
    shape: tuple[int, ...]
    """Of each."""
    start: int = 0
    """First element of the first one."""
    stride: int = 0
    """Elements from the start of one to that of the next."""
    tensors: int = 1
    """How many there are."""

    @property
    def places(self) -> list[tuple[str, int]]:
        """Name and first element of each."""
        if self.tensors == 1:
            return [(self.name, self.start)]
        return [
            (self.name.replace("{}", str(number)), self.start + number * self.stride)
            for number in range(self.tensors)
        ]


def hub_ranges(
    hub: Iterable[HubPart], *, item_bytes: int
) -> Iterator[tuple[str, tuple[int, ...], slice]]:
    """Yield name, shape and bytes of each tensor on the hub; the slice is one of the data of the
    tensor that has these parts."""
    for part in hub:
        size_bytes = math.prod(part.shape) * item_bytes
        for name, start in part.places:
            yield name, part.shape, slice(start * item_bytes, start * item_bytes + size_bytes)


HubParts = dict[str, tuple[HubPart, ...]]
"""By the name of a tensor: all of its elements. A tensor that is not here has its name and shape on
the hub, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A dense array and its name."""

    name: str
    dtype: str
    """As torch names it, without `torch.`: "bfloat16"."""
    shape: tuple[int, ...]
    data: bytes | memoryview
    """Little-endian, C order; one byte an item. Never changes."""
    hub: tuple[HubPart, ...] = ()
    """All of its data as tensors of a checkpoint on the hub; empty: not known."""

    def in_hub_names(self) -> Iterator[NamedTensor]:
        """Yield its tensors on the hub, as views of its data."""
        data = memoryview(self.data)
        item_bytes = data.nbytes // max(1, math.prod(self.shape))
        for name, shape, place in hub_ranges(self.hub, item_bytes=item_bytes):
            yield NamedTensor(name=name, dtype=self.dtype, shape=shape, data=data[place])
