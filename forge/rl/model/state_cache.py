"""The cache that a recurrent layer of a transformers model reads its states from.

Owns the states before the first token, as such layers read them. Its subclasses keep the states
behind the last token.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from forge.rl.attention.forks import State


class StateCache:
    """Stands in for transformers' cache in one layer.

    Transformers up to 5.17 reads the states from `cache.layers[layer_idx]`; later releases call
    methods of the cache.
    """

    def __init__(self, before: State, *, record_past: bool) -> None:
        """`record_past`: the layer computes a single token like several."""
        self._before = before
        self.record_past = record_past
        self.conv_states = {key[1]: one for key, one in before.items() if key[0] == "conv"}
        self.recurrent_states = {
            key[1]: one for key, one in before.items() if key[0] == "recurrent"
        }

    @property
    def layers(self) -> Self:
        """The cache by number of the layer."""
        return self

    def __getitem__(self, layer_idx: int) -> Self:
        return self

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Inputs of the convolution before the first token, [B, C, kernel]."""
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state before the first token, [B, ...]."""
        return self.recurrent_states.get(state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Whether there are states before the first token."""
        return bool(self._before)

    def is_recording_past(self, layer_idx: int) -> bool:
        """See `record_past`."""
        return self.record_past
