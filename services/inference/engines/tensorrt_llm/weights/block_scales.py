"""FP8 checkpoints with a scale for each block, and a trainer's tensors in their form.

Such a checkpoint (DeepSeek V3, Qwen3 FP8) has a matrix `X` in float8_e4m3fn and `X_scale_inv`, one
number for each block of the matrix, of 128 x 128 as a rule: a weight is `X` times the scale of its
block. The activations are quantized by the library, in each step. Imports torch in the call that
converts, since hosts without an engine read checkpoints as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.core.named_tensor import NamedTensor

if TYPE_CHECKING:
    import torch

TYPE = "float8_e4m3fn"
_SCALES = "_scale_inv"
_POWERS_OF_TWO = "ue8m0"

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
"""A cast between these keeps the values; one to fewer bits needs scales."""

TypeAndShape = tuple[str, tuple[int, ...]]
"""Of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScales:
    """The quantization of a checkpoint."""

    block: tuple[int, int]
    """Rows and columns with one scale."""
    matrices: frozenset[str]
    """Names of the quantized tensors."""
    powers_of_two: bool
    """Whether scales are powers of two, as Blackwell's kernels need them."""

    def forms(self, found: Mapping[str, TypeAndShape]) -> dict[str, TypeAndShape]:
        """Return what becomes of tensors by name: those of `matrices` that are not quantized
        get scales beside them, and floats another type."""
        forms = dict(found)
        for name in self.matrices & found.keys():
            dtype, shape = found[name]
            if dtype != TYPE and len(shape) == len(self.block):
                forms[name] = TYPE if dtype in FLOATS else dtype, shape
                forms[name + _SCALES] = "float32", self._blocks(shape)
        return forms

    def converted(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield tensors whose `forms` have been checked, as the checkpoint has them. Quantized ones
        are copied, one at a time."""
        from services.inference.engines.tensor_bytes import from_named, raw_bytes

        for tensor in tensors:
            if tensor.name not in self.matrices or tensor.dtype == TYPE:
                yield tensor
                continue
            matrix, scales = self._quantized(from_named(tensor))
            yield NamedTensor(
                name=tensor.name, dtype=TYPE, shape=tensor.shape, data=raw_bytes(matrix)
            )
            yield NamedTensor(
                name=tensor.name + _SCALES,
                dtype="float32",
                shape=tuple(scales.shape),
                data=raw_bytes(scales),
            )

    def _blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True))

    def _quantized(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix in FP8 and its scales: the largest weight of a block becomes the largest
        number of the type, or with powers of two at most that."""
        import torch

        rows, columns = matrix.shape
        high, wide = self.block
        down, across = self._blocks((rows, columns))
        whole = matrix.new_zeros(down * high, across * wide, dtype=torch.float32)
        whole[:rows, :columns] = matrix
        blocks = whole.view(down, high, across, wide)
        largest = torch.finfo(torch.float8_e4m3fn).max
        scales = blocks.abs().amax((1, 3)) / largest
        # A block of zeros, or of numbers below the range of a scale: any scale keeps them.
        scales[scales < torch.finfo(torch.float32).tiny] = 1.0
        if self.powers_of_two:
            scales = scales.log2().ceil().exp2()
        blocks = (blocks / scales[:, None, :, None]).clamp(-largest, largest)
        narrow = blocks.view(down * high, across * wide)[:rows, :columns]
        return narrow.to(torch.float8_e4m3fn).contiguous(), scales.contiguous()


def read_block_scales(
    config: Mapping[str, Any], types: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> BlockScales | None:
    """Return the quantization that `config.json` and the tensors of a checkpoint describe; None for
    another one, and for none."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != "fp8":
        return None
    match found.get("weight_block_size"):
        case [int(high), int(wide)] if high > 0 and wide > 0:
            return BlockScales(
                block=(high, wide),
                matrices=frozenset(
                    name
                    for name in types
                    if types[name] == TYPE and len(shapes[name]) == 2 and name + _SCALES in types
                ),
                powers_of_two=found.get("scale_fmt") == _POWERS_OF_TWO,
            )
    return None
