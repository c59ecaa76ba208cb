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
    name: tuple[str, int]
    start: int
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def place(self) -> slice:
        """Place of its bytes in a row."""
        return slice(self.start, self.start + self.bytes)


class StateShape:
    """Place of each state in a row."""

    def __init__(self, states: Mapping[Key, torch.Tensor]) -> None:
        """`states`: of one sequence, each with a batch of 1."""
        self._layers: dict[int, list[_Part]] = {}
        end = 0
        for (layer, kind, number), state in sorted(states.items()):
            part = _Part((kind, number), end, state.nbytes, tuple(state.shape[1:]), state.dtype)
            self._layers.setdefault(layer, []).append(part)
            end += -(-part.bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.bytes = end
        """S."""

    def __str__(self) -> str:
        """The layout, for fingerprints."""
        return " ".join(
            f"{layer} {part.name}:{list(part.shape)}:{part.dtype}"
            for layer, parts in self._layers.items()
            for part in parts
        )

    def zeros(self, rows: int, device: torch.device) -> torch.Tensor:
        """The states before the first token, uint8 [rows, S]."""
        return torch.zeros((rows, self.bytes), dtype=torch.uint8, device=device)

    def of_layer(self, layer: int, rows_BS: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
        """The states of a layer by kind and number, [B, ...] each; views of the rows."""
        return {
            part.name: rows_BS[:, part.place].view(part.dtype).view(len(rows_BS), *part.shape)
            for part in self._layers[layer]
        }

    def copy_layer(self, layer: int, source_BS: torch.Tensor, target_BS: torch.Tensor) -> None:
        """Copy the states of a layer from rows to rows."""
        for part in self._layers[layer]:
            target_BS[:, part.place] = source_BS[:, part.place]
