"""The states of a model's recurrent layers after one token, as bytes.

All states of a sequence are one row of bytes, so that a row is copied, cached, sent and checked as
a whole. A layer reads and writes its part of many rows in place.

Shapes: B rows, S bytes of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_ALIGNMENT_BYTES = 64
Key = tuple[int, str, int]
"""Number of a recurrent layer, "conv" or "recurrent", and number of the state in the layer."""


@dataclass(frozen=True, slots=True)
class _Part:
    start: int
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class StateShape:
    """Where each state lies in a row."""

    def __init__(self, states: Mapping[Key, torch.Tensor]) -> None:
        """`states`: of one sequence, each with a batch of 1."""
        self._parts: dict[Key, _Part] = {}
        end = 0
        for key, state in sorted(states.items()):
            part = _Part(end, state.nbytes, tuple(state.shape[1:]), state.dtype)
            self._parts[key] = part
            end += -(-part.bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.bytes = end
        """S."""

    def __str__(self) -> str:
        """The layout, for fingerprints."""
        return " ".join(
            f"{key}:{list(part.shape)}:{part.dtype}" for key, part in self._parts.items()
        )

    def zeros(self, rows: int, device: torch.device) -> torch.Tensor:
        """The states before the first token, uint8 [rows, S]."""
        return torch.zeros((rows, self.bytes), dtype=torch.uint8, device=device)

    def of_layer(self, layer: int, rows_BS: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
        """The states of a layer by kind and number, [B, ...] each; views of the rows."""
        return {
            (kind, number): rows_BS[:, part.start : part.start + part.bytes]
            .view(part.dtype)
            .view(len(rows_BS), *part.shape)
            for (owner, kind, number), part in self._parts.items()
            if owner == layer
        }

    def copy_layer(self, layer: int, source_BS: torch.Tensor, target_BS: torch.Tensor) -> None:
        """Copy the states of a layer from rows to rows."""
        for (owner, _, _), part in self._parts.items():
            if owner == layer:
                own = slice(part.start, part.start + part.bytes)
                target_BS[:, own] = source_BS[:, own]
