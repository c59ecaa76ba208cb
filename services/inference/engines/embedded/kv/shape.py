"""The shape of keys and values: what the model has, and what one token takes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What the keys and values of one token look like."""

    layers: int
    windowed: bool
    """Whether some layer sees only the last tokens."""
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * 2 * self.heads * self.head_size * self.dtype.itemsize

    def empty(self, tokens: int) -> torch.Tensor:
        """Room for one sequence: [layers, 2, heads, tokens, head_size]."""
        return torch.empty(
            (self.layers, 2, self.heads, tokens, self.head_size),
            dtype=self.dtype,
            device=self.device,
        )
