"""The numbers of a step's rows as int64 columns, so that one copy brings them to a device."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from services.inference.engines.embedded.sequences import DecodeSequence


def columns(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """One consecutive column for each number of the rows: kernels read them by address."""
    return torch.from_numpy(np.ascontiguousarray(np.asarray(rows, dtype=np.int64).T))


def draw_numbers(sequence: DecodeSequence, index: int) -> tuple[int, int, int]:
    """Seed, position and temperature of the draw `index` tokens behind the next one."""
    sampling = sequence.prompt.sampling
    seed = sampling.seed
    # The int64 with the bits of an unsigned one.
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    heat: int = struct.unpack("<q", struct.pack("<d", sampling.temperature))[0]
    return signed, sequence.position + index, heat


def heats(column_N: torch.Tensor) -> torch.Tensor:
    """The temperatures of a column of `draw_numbers`, float32."""
    return column_N.view(torch.float64).float()
