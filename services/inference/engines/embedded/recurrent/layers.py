"""The recurrent layers of any transformers model, over packed passes.

Owns the forward that replaces a recurrent layer's own. It runs the layer's own forward on the
tokens of one sequence after the other, or on one token of each running sequence at once, and stands
in for the cache that transformers hands to such layers: it begins with the states of these
sequences and leaves the states after their last token in the same place. A pass without sequences
is one sequence from its start, whose states nothing keeps.

Shapes: N packed tokens, B sequences of a batch, T tokens of each, C hidden channels, S bytes of the
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
from forge.rl.model.forked_states import cache_name, scan_takes_state
from services.inference.engines.embedded.recurrent.shape import Key, StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """Sequences whose recurrent layers compute together."""

    places_BT: torch.Tensor | None
    """Index in the pass of each token; None: all N tokens in their order, one of each sequence."""
    rows_BS: torch.Tensor
    """The states before these tokens; afterwards those behind them."""
    is_start: bool = False
    """Whether these are the sequences' first tokens."""
    begin_BS: torch.Tensor | None = None
    """States to begin with, in place of those in `rows_BS`."""
    keep_BS: torch.Tensor | None = None
    """Further places for the states after these tokens."""


class RecurrentLayers:
    """The recurrent layers of one model; changes their forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        layers = [
            _Layer(number, one, cache_name(one), scan_takes_state(one))
            for number, one in enumerate(filter(cache_name, model.modules()))
        ]
        if layers:
            scans.patch(model)
        for layer in layers:
            layer.module.forward = partial(self._forward, layer)
        self.shape: StateShape | None = None
        """Shape of the states of one sequence; None before `measure`."""
        self._batches: Sequence[StateBatch] | None = None
        self._seen: dict[Key, torch.Tensor] = {}

    @contextmanager
    def used(self, batches: Sequence[StateBatch]) -> Iterator[None]:
        """Within, a pass has the tokens of these sequences, in the order of their computation."""
        self._batches = batches
        try:
            yield
        finally:
            self._batches = None

    def measure(self) -> StateShape | None:
        """Return the shape of the states that the last pass left, of one sequence; None without
        any."""
        seen, self._seen = self._seen, {}
        self.shape = StateShape(seen) if seen else None
        return self.shape

    def _forward(
        self, layer: _Layer, hidden_states: torch.Tensor, *places: Any, **named: Any
    ) -> torch.Tensor:
        if self._batches is None:
            return layer.own(hidden_states, *places, **named)
        named.pop("attention_mask", None)
        if not self._batches:
            named[layer.cache_name] = _FirstCache(layer.number, self._seen)
            return layer.own(hidden_states, **named)
        output_NC: torch.Tensor | None = None
        for batch in self._batches:
            output_BTC = self._compute(layer, batch, hidden_states[0], named)
            if batch.places_BT is None:
                return output_BTC.transpose(0, 1)
            if output_NC is None:
                output_NC = output_BTC.new_empty((hidden_states.shape[1], output_BTC.shape[2]))
            output_NC[batch.places_BT] = output_BTC
        assert output_NC is not None
        return output_NC[None]

    def _compute(
        self,
        layer: _Layer,
        batch: StateBatch,
        hidden_NC: torch.Tensor,
        named: dict[str, Any],
    ) -> torch.Tensor:
        assert self.shape is not None
        if batch.begin_BS is not None:
            self.shape.copy_layer(layer.number, batch.begin_BS, batch.rows_BS)
        states = self.shape.of_layer(layer.number, batch.rows_BS)
        given = named | {layer.cache_name: _RowsCache(states)}
        places_BT = batch.places_BT
        hidden_BTC = hidden_NC[:, None] if places_BT is None else hidden_NC[places_BT]
        if batch.is_start or layer.takes_state:
            output_BTC = layer.own(hidden_BTC, **given)
        else:
            steps = [layer.own(one_BC[:, None], **given) for one_BC in hidden_BTC.unbind(1)]
            output_BTC = torch.cat(steps, dim=1)
        if batch.keep_BS is not None:
            self.shape.copy_layer(layer.number, batch.rows_BS, batch.keep_BS)
        return output_BTC


@dataclass(frozen=True, slots=True)
class _Layer:
    number: int
    module: torch.nn.Module
    cache_name: str
    """Name of the cache argument of its forward."""
    takes_state: bool
    """See `scan_takes_state`."""

    def own(self, hidden_states: torch.Tensor, *places: Any, **named: Any) -> torch.Tensor:
        """The layer's own forward."""
        kind = type(self.module)
        with scans.handled(self._scan):
            output: object = kind.forward(self.module, hidden_states, *places, **named)
        if not isinstance(output, torch.Tensor):
            raise InvalidArgument(f"{kind.__name__} returns more than its output")
        return output

    def _scan(self, name: str, compute: scans.Compute, arguments: dict[str, Any]) -> Any:
        """Bound the time step of a decode step: transformers bounds it only in scans of chunks."""
        least, most = getattr(self.module, "time_step_limit", (0.0, math.inf))
        if name == "mamba2_selective_state_update" and (least, most) != (0.0, math.inf):
            step, bias = arguments["dt"], arguments["dt_bias"]
            kind = torch.float64 if step.device.type == "cpu" else torch.float32
            bounds = (_before_softplus(least), _before_softplus(most))
            step = (step.to(kind) + bias.to(kind)).clamp(*bounds)
            arguments = arguments | {"dt": step, "dt_bias": None}
        return compute(arguments)


def _before_softplus(step: float) -> float:
    if step <= 0:
        return -math.inf
    return math.log(math.expm1(step)) if step < 20 else step


class _FirstCache:
    """The cache of one layer at the start of one sequence; notes the shapes of its states."""

    def __init__(self, number: int, seen: dict[Key, torch.Tensor]) -> None:
        self._number = number
        self._seen = seen

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Nothing is before the first token."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Nothing is before the first token."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Nothing is before the first token."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """One token may take a path of its own."""
        return False

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
        self._seen[self._number, "recurrent", state_idx] = recurrent_states
        return recurrent_states


class _RowsCache:
    """The cache of one layer over rows of states, as transformers' layers use it."""

    def __init__(self, states: dict[tuple[str, int], torch.Tensor]) -> None:
        self._states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Inputs of the convolution before the first token; changed in place."""
        return self._states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state before the first token; changed in place."""
        return self._states.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Zeros are the state before the first token."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """One token may take a path of its own."""
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Store the last inputs; return all with those before them."""
        kept = self._states["conv", state_idx]
        whole = torch.cat([kept, conv_states.to(kept.dtype)], dim=-1)
        kept.copy_(whole[..., -kept.shape[-1] :])
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Store the state behind the last token."""
        kept = self._states["recurrent", state_idx]
        if recurrent_states is not kept:
            kept.copy_(recurrent_states)
        return kept
