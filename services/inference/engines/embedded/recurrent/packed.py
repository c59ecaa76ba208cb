"""A recurrent layer over several sequences in one packed row.

The layer's own forward runs once over all tokens of a pass, so its matrix products, norms and gates
do, too. Only its convolution and its scan mix tokens: they are computed for one sequence after the
other, each from its states.

Owns the division of these two functions, and stands in for the cache that transformers hands to
such layers. Shapes: N packed tokens, T tokens of a piece, C channels of the convolution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from forge.rl import scans
from forge.rl.begun_scan import STATE
from forge.rl.model.state_cache import StateCache
from services.inference.engines.embedded.recurrent.shape import StateShape

_LEAST_CHUNK = 16
_KERNELS = ("fla", "mamba_ssm")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    tokens: tuple[str, ...]
    """Arguments with a value for each token."""
    axis: int = 1
    """Axis of the tokens."""
    begin: str
    """Argument with the state to begin with."""
    chunk: int = 0
    """Tokens that it computes at once by default; 0: the layer says, if it has chunks."""


_DELTA = ("query", "key", "value", "g", "beta")
_SCANS = {
    "chunk_kimi_delta_attention": _Scan(tokens=_DELTA, begin="initial_state", chunk=64),
    scans.LIGHTNING: _Scan(tokens=("query", "key", "value"), begin="initial_state"),
    "mamba2_chunk_scan": _Scan(tokens=("hidden_states", "dt", "B", "C"), begin="initial_states"),
    scans.MAMBA1: _Scan(tokens=("hidden_states", "dt", "B", "C", "z"), axis=2, begin=STATE),
    "torch_chunk_gated_delta_rule": _Scan(tokens=_DELTA, begin="initial_state", chunk=64),
}
_RECURRENT = ("recurrent", 0)
States = dict[tuple[str, int], torch.Tensor]
"""States of one layer and sequence, by kind and number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive tokens of one sequence in a pass."""

    place: slice
    """Place of its tokens in the pass."""
    row_1S: torch.Tensor
    """The states before these tokens; afterwards those behind them."""
    begin_1S: torch.Tensor | None = None
    """States to begin with, in place of those in `row_1S`."""
    keep_1S: torch.Tensor | None = None
    """Where the states behind these tokens are stored, too."""

    @property
    def tokens(self) -> int:
        """T."""
        size: int = self.place.stop - self.place.start
        return size


def can_pack(layer: torch.nn.Module) -> bool:
    """Whether the convolution and the scan of a layer are known."""
    return not _functions(layer).keys().isdisjoint((scans.CONVOLUTION, scans.LIGHTNING))


class PackedLayer(StateCache):
    """The cache and the handler of scans for one pass of one layer; `pieces` are all tokens of the
    pass in their order."""

    def __init__(self, number: int, shape: StateShape, pieces: Sequence[Piece]) -> None:
        super().__init__({}, record_past=False)
        self._pieces = pieces
        self._states = [_views(shape, number, piece) for piece in pieces]
        self._convolution = 0
        """Number of the state of the next convolution."""

    def compute(self, name: str, compute: scans.Compute, arguments: dict[str, Any]) -> Any:
        """Handle one call; see `scans.Handler`."""
        if name == scans.CONVOLUTION:
            return self._convolve(compute, arguments)
        scan = _SCANS.get(name)
        return compute(arguments) if scan is None else self._scan(scan, compute, arguments)

    def _convolve(self, compute: scans.Compute, arguments: dict[str, Any]) -> torch.Tensor:
        inputs_1CN: torch.Tensor = arguments["hidden_states"]

        def of_piece(piece: Piece, state: torch.Tensor) -> torch.Tensor:
            own = inputs_1CN[..., piece.place].to(state.dtype)
            whole = torch.cat([state, own], dim=-1)
            state.copy_(whole[..., -state.shape[-1] :])
            found: torch.Tensor = compute(arguments | {"hidden_states": whole})
            return found[..., -piece.tokens :]

        outputs = self._of_pieces(("conv", self._convolution), of_piece)
        return torch.cat(outputs, dim=-1).to(inputs_1CN.dtype)

    def _scan(
        self, scan: _Scan, compute: scans.Compute, arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def of_piece(piece: Piece, state: torch.Tensor) -> torch.Tensor:
            part = dict(arguments)
            for name in scan.tokens:
                if part.get(name) is not None:
                    part[name] = part[name].narrow(scan.axis, piece.place.start, piece.tokens)
            part[scan.begin] = state
            _fit_chunk(part, scan.chunk, piece.tokens)
            output, after = compute(part)
            state.copy_(after)
            found: torch.Tensor = output
            return found

        outputs = self._of_pieces(_RECURRENT, of_piece)
        return torch.cat(outputs, dim=scan.axis), self._states[-1][0][_RECURRENT]

    def _of_pieces(
        self, key: tuple[str, int], compute: Callable[[Piece, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Compute the pieces in their order: a later one may begin with the states that an earlier
        one keeps."""
        outputs = []
        for piece, (now, begin, keep) in zip(self._pieces, self._states, strict=True):
            if begin is not None:
                now[key].copy_(begin[key])
            outputs.append(compute(piece, now[key]))
            if keep is not None:
                keep[key].copy_(now[key])
        return outputs

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Note the state of the convolution that follows."""
        self._convolution = state_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, **_: Any) -> Any:
        """The scan has stored the states."""
        return recurrent_states


@cache
def _has_kernels() -> bool:
    """Whether transformers finds a package with scans for GPUs, in place of its own ones."""
    return any(find_spec(name) is not None for name in _KERNELS)


def _functions(layer: torch.nn.Module) -> dict[str, Any]:
    return vars(sys.modules[type(layer).__module__])


def _views(
    shape: StateShape, layer: int, piece: Piece
) -> tuple[States, States | None, States | None]:
    rows = (piece.row_1S, piece.begin_1S, piece.keep_1S)
    now, begin, keep = (None if one is None else shape.of_layer(layer, one) for one in rows)
    assert now is not None
    return now, begin, keep


def _fit_chunk(part: dict[str, Any], chunk: int, tokens: int) -> None:
    """A scan pads to whole chunks: a short piece takes a short one, except with kernels of a GPU,
    which are compiled for a size."""
    size = part.get("chunk_size") or chunk
    on_cpu = next(iter(part.values())).device.type == "cpu"
    if size and (on_cpu or not _has_kernels()):
        part["chunk_size"] = min(size, max(_LEAST_CHUNK, 1 << (tokens - 1).bit_length()))
