"""The shape of a model's keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Shape, type and device of the keys and values of one token."""

    layers: int
    windowed: bool
    """Whether some layer has a sliding window."""
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * 2 * self.heads * self.head_size * self.dtype.itemsize

    def empty(self, tokens: int) -> torch.Tensor:
        """Allocate one sequence: [layers, 2, heads, tokens, head_size]."""
        return torch.empty(
            (self.layers, 2, self.heads, tokens, self.head_size),
            dtype=self.dtype,
            device=self.device,
        )
