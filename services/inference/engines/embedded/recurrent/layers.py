"""The recurrent layers of any transformers model, over packed passes.

Owns the forward that replaces a recurrent layer's own. It runs the layer's own forward on pieces of
several sequences in one row (`packed`), or on one token of each running sequence at once, and
stands in for the cache that transformers hands to such layers: it begins with the states of these
sequences and leaves the states after their last token in the same place. A pass without sequences
is one sequence from its start, whose states nothing keeps.

Shapes: N packed tokens, B running sequences, T tokens of a piece, C hidden channels, S bytes of the
states of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forge.core.errors import InvalidArgument
from forge.rl import scans
from forge.rl.model import lightning
from forge.rl.model.forked_states import cache_name
from forge.rl.model.state_cache import StateCache
from services.inference.engines.embedded.recurrent import mamba2_step
from services.inference.engines.embedded.recurrent.packed import (
    PackedLayer,
    Piece,
    can_pack,
)
from services.inference.engines.embedded.recurrent.shape import Key, StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """Running sequences whose last tokens are a pass."""

    rows_BS: torch.Tensor
    """The states before these tokens; afterwards those behind them."""
    places_B: torch.Tensor | None = None
    """Index in the pass of each token; None: all tokens in their order."""


Sequences = StateBatch | Sequence[Piece]
"""Sequences of a pass; without any it is one sequence from its start."""


class RecurrentLayers:
    """The recurrent layers of one model; changes their forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        lightning.adopt(model)
        layers = [
            _Layer(number, one, cache_name(one))
            for number, one in enumerate(filter(cache_name, model.modules()))
        ]
        if layers:
            scans.patch(model)
        for layer in layers:
            layer.module.forward = partial(self._forward, layer)
        self.shape: StateShape | None = None
        """Shape of the states of one sequence; None before `measure`."""
        self._sequences: Sequences | None = None
        self._seen: dict[Key, torch.Tensor] = {}

    @contextmanager
    def used(self, sequences: Sequences) -> Iterator[None]:
        """Within, a pass has the tokens of these sequences."""
        self._sequences = sequences
        try:
            yield
        finally:
            self._sequences = None

    def measure(self) -> StateShape | None:
        """Return the shape of the states that the last pass left, of one sequence; None without
        any."""
        seen, self._seen = self._seen, {}
        self.shape = StateShape(seen) if seen else None
        return self.shape

    def _forward(
        self, layer: _Layer, hidden_states: torch.Tensor, *places: Any, **named: Any
    ) -> torch.Tensor:
        sequences = self._sequences
        if sequences is None:
            return layer.own(hidden_states, *places, **named)
        named.pop("attention_mask", None)
        if isinstance(sequences, StateBatch):
            return self._step(layer, sequences, hidden_states, named)
        if not sequences:
            named[layer.cache_name] = _FirstCache(layer.number, self._seen)
            return layer.own(hidden_states, **named)
        assert self.shape is not None
        if hidden_states.shape[1] == 1 or not can_pack(layer.module):
            outputs = [self._alone(layer, one, hidden_states, named) for one in sequences]
            return torch.cat(outputs, dim=1)
        packed = PackedLayer(layer.number, self.shape, sequences)
        named[layer.cache_name] = packed
        return layer.own(hidden_states, scan=packed.compute, **named)

    def _step(
        self, layer: _Layer, batch: StateBatch, hidden_1NC: torch.Tensor, named: dict[str, Any]
    ) -> torch.Tensor:
        """One token of each sequence."""
        assert self.shape is not None
        states = self.shape.of_layer(layer.number, batch.rows_BS)
        named[layer.cache_name] = _RowsCache(states)
        hidden_NC = hidden_1NC[0]
        if batch.places_B is None:
            return layer.own(hidden_NC[:, None], **named).transpose(0, 1)
        output_B1C = layer.own(hidden_NC[batch.places_B, None], **named)
        output_1NC = output_B1C.new_empty((1, *output_B1C.shape[::2]))
        output_1NC[0, batch.places_B] = output_B1C[:, 0]
        return output_1NC

    def _alone(
        self, layer: _Layer, piece: Piece, hidden_1NC: torch.Tensor, named: dict[str, Any]
    ) -> torch.Tensor:
        """The tokens of one piece."""
        assert self.shape is not None
        if piece.begin_1S is not None:
            self.shape.copy_layer(layer.number, piece.begin_1S, piece.row_1S)
        states = self.shape.of_layer(layer.number, piece.row_1S)
        given = named | {layer.cache_name: _RowsCache(states)}
        output_1TC = layer.own(hidden_1NC[:, piece.place], **given)
        if piece.keep_1S is not None:
            self.shape.copy_layer(layer.number, piece.row_1S, piece.keep_1S)
        return output_1TC


@dataclass(frozen=True, slots=True)
class _Layer:
    number: int
    module: torch.nn.Module
    cache_name: str
    """Name of the cache argument of its forward."""

    def own(
        self,
        hidden_states: torch.Tensor,
        *places: Any,
        scan: scans.Handler | None = None,
        **named: Any,
    ) -> torch.Tensor:
        """The layer's own forward, with other scans."""
        kind = type(self.module)
        with scans.handled(scan or self._scan):
            output: object = kind.forward(self.module, hidden_states, *places, **named)
        if not isinstance(output, torch.Tensor):
            raise InvalidArgument(f"{kind.__name__} returns more than its output")
        return output

    def _scan(self, name: str, compute: scans.Compute, arguments: dict[str, Any]) -> Any:
        """Bound the time step of a decode step: transformers bounds it only in scans of chunks."""
        if name != mamba2_step.NAME:
            return compute(arguments)
        least, most = getattr(self.module, "time_step_limit", (0.0, math.inf))
        step, bias = arguments["dt"], arguments["dt_bias"]
        if step.device.type == "cpu" and arguments["z"] is None:
            return mamba2_step.mamba2_step(arguments, (least, most))
        if (least, most) != (0.0, math.inf):
            bounds = (_before_softplus(least), _before_softplus(most))
            step = (step.float() + bias.float()).clamp(*bounds)
            arguments = arguments | {"dt": step, "dt_bias": None}
        return compute(arguments)


def _before_softplus(step: float) -> float:
    if step <= 0:
        return -math.inf
    return math.log(math.expm1(step)) if step < 20 else step


class _FirstCache(StateCache):
    """The cache of one layer at the start of one sequence; notes the shapes of its states."""

    def __init__(self, number: int, seen: dict[Key, torch.Tensor]) -> None:
        super().__init__({}, record_past=False)
        self._number = number
        self._seen = seen

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Note the last inputs, as many as the convolution has."""
        size = conv_kernel_size or conv_states.shape[-1]
        self._seen[self._number, "conv", state_idx] = conv_states.new_zeros(
            (*conv_states.shape[:-1], size)
        )
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Note the state."""
        self._seen[self._number, "recurrent", state_idx] = scans.unrounded(recurrent_states)
        return recurrent_states


class _RowsCache(StateCache):
    """The cache of one layer over rows of states, which the layer changes in place."""

    def __init__(self, states: dict[tuple[str, int], torch.Tensor]) -> None:
        super().__init__(states, record_past=False)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Store the last inputs; return all with those before them."""
        kept = self._before["conv", state_idx]
        whole = torch.cat([kept, conv_states.to(kept.dtype)], dim=-1)
        kept.copy_(whole[..., -kept.shape[-1] :])
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Store the state behind the last token."""
        kept = self._before["recurrent", state_idx]
        if recurrent_states is not kept:
            kept.copy_(scans.unrounded(recurrent_states))
        return kept
