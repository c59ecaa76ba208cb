"""The forms of quantized matrices: E4M3 or E2M1 numbers, and the scales beside them.

Owns the arithmetic, not the choice of tensors (`quantization`). Imports torch in the calls that
convert, since hosts without an engine read checkpoints as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

E4M3 = "float8_e4m3fn"
PACKED = "uint8"
"""Of two E2M1 numbers."""
BLOCK = 16
"""Columns of a matrix in E2M1 with one scale."""

_E4M3_TOLERANCE = 0.8
_E2M1_TOLERANCE = 1.6
"""Above the largest error of 16 probes of SmolLM2-135M with right scales, in nats
(docs/tensorrt_llm.md, Quantized checkpoints)."""

_E4M3_LARGEST = 448.0
_E4M3_LEAST = 2.0**-9
_E2M1_LARGEST = 6.0
# Between two neighbours of 0, .5, 1, 1.5, 2, 3, 4, 6: a larger number rounds up. A tie rounds to
# the even code, so a bound below an even code is the last float32 before the middle.
_E2M1_BOUNDS = [0.25, 0.75 - 2.0**-24, 1.25, 1.75 - 2.0**-23, 2.5, 3.5 - 2.0**-22, 5.0]
_E2M1_SIGN = 8

TypeAndShape = tuple[str, tuple[int, ...]]
"""Of a tensor."""


class MatrixForm(Protocol):
    """How a checkpoint has a quantized matrix: several tensors, named by the suffix that each adds
    to the matrix's name, "" for the matrix itself."""

    dtype: ClassVar[str]
    """Type of the matrix itself."""
    probe_tolerance: ClassVar[float]
    """Largest mean error of a probe, in nats, beside the trainer's log-probs."""

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, TypeAndShape]:
        """Return types and shapes for a matrix of `shape`, two sizes."""

    def narrowed(self, matrices: Sequence[torch.Tensor]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield each matrix in this form. All of them share the scale of a whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """E4M3 with a scale for each block (DeepSeek V3, Qwen3 FP8): a weight is its number times the
    scale of its block."""

    block: tuple[int, int]
    """Rows and columns with one scale."""
    powers_of_two: bool
    """Whether scales are powers of two, as Blackwell's kernels need them."""

    dtype: ClassVar[str] = E4M3
    probe_tolerance: ClassVar[float] = _E4M3_TOLERANCE

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, TypeAndShape]:
        """See `MatrixForm`."""
        return {"": (E4M3, shape), "_scale_inv": ("float32", self._blocks(shape))}

    def narrowed(self, matrices: Sequence[torch.Tensor]) -> Iterator[Mapping[str, torch.Tensor]]:
        """See `MatrixForm`. The largest weight of a block becomes the largest number of the type,
        or with powers of two at most that."""
        import torch

        for matrix in matrices:
            rows, columns = matrix.shape
            high, wide = self.block
            down, across = self._blocks((rows, columns))
            whole = matrix.new_zeros(down * high, across * wide, dtype=torch.float32)
            whole[:rows, :columns] = matrix
            blocks = whole.view(down, high, across, wide)
            scales = _positive(blocks.abs().amax((1, 3)) / _E4M3_LARGEST)
            if self.powers_of_two:
                scales = scales.log2().ceil().exp2()
            narrow = _e4m3(blocks / scales[:, None, :, None]).view(down * high, across * wide)
            yield {"": narrow[:rows, :columns].contiguous(), "_scale_inv": scales.contiguous()}

    def _blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """E4M3 with one scale: a weight is its number times the scale (ModelOpt, FP8)."""

    scalar: tuple[int, ...]
    """Shape of a single number in the checkpoint."""

    dtype: ClassVar[str] = E4M3
    probe_tolerance: ClassVar[float] = _E4M3_TOLERANCE

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, TypeAndShape]:
        """See `MatrixForm`."""
        return {"": (E4M3, shape), "_scale": ("float32", self.scalar)}

    def narrowed(self, matrices: Sequence[torch.Tensor]) -> Iterator[Mapping[str, torch.Tensor]]:
        """See `MatrixForm`. The largest weight of all becomes the largest number of the type."""
        scale = _positive(_largest(matrices) / _E4M3_LARGEST)
        for matrix in matrices:
            yield {"": _e4m3(matrix.float() / scale), "_scale": scale.reshape(self.scalar)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """E2M1, two numbers in a byte, the left one in the low bits (ModelOpt, NVFP4).

    A weight is its number times two scales: one in E4M3 for 16 columns of a row, and one for the
    whole tensor, the largest weight over 6 * 448.
    """

    scalar: tuple[int, ...]
    """Shape of a single number in the checkpoint."""

    dtype: ClassVar[str] = PACKED
    probe_tolerance: ClassVar[float] = _E2M1_TOLERANCE

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, TypeAndShape]:
        """See `MatrixForm`. A matrix whose columns 16 does not divide has no such form: it gets
        shapes that no matrix has together."""
        rows, columns = shape
        packed = shape if columns % BLOCK else (rows, columns // 2)
        return {
            "": (PACKED, packed),
            "_scale": (E4M3, (rows, columns // BLOCK)),
            "_scale_2": ("float32", self.scalar),
        }

    def narrowed(self, matrices: Sequence[torch.Tensor]) -> Iterator[Mapping[str, torch.Tensor]]:
        """See `MatrixForm`."""
        whole = _positive(_largest(matrices) / (_E2M1_LARGEST * _E4M3_LARGEST))
        for matrix in matrices:
            blocks = matrix.float().reshape(len(matrix), -1, BLOCK)
            scales = blocks.abs().amax(-1) / (_E2M1_LARGEST * whole)
            # Less would be zero. A block of zeros has any scale; that of published ones is 1.
            scales = _e4m3(scales.clamp(min=_E4M3_LEAST).where(scales > 0, 1.0))
            codes = _e2m1(blocks / (scales.float() * whole)[..., None]).flatten(1)
            yield {
                "": codes[:, 0::2] | codes[:, 1::2] << 4,
                "_scale": scales,
                "_scale_2": whole.reshape(self.scalar),
            }


def _largest(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack([matrix.abs().amax().float() for matrix in matrices]).amax()


def _positive(scales: torch.Tensor) -> torch.Tensor:
    """Replace the scales of zeros, or of numbers below the range of a scale: any scale keeps
    them."""
    import torch

    return scales.where(scales >= torch.finfo(torch.float32).tiny, 1.0)


def _e4m3(numbers: torch.Tensor) -> torch.Tensor:
    import torch

    return numbers.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)


def _e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes, one in a byte; larger numbers become the largest."""
    import torch

    bounds = torch.tensor(_E2M1_BOUNDS)
    codes = torch.bucketize(numbers.abs(), bounds, out_int32=True).to(torch.uint8)
    return codes | (numbers < 0).to(torch.uint8) * _E2M1_SIGN
