"""Division of the memory for keys and values in models with recurrent layers."""

from __future__ import annotations

from services.inference.engines.embedded.kv.shape import KvShape

_TOKENS_OF_STATES = 512
"""Tokens with keys and values that there is room for beside each sequence's states."""


def state_rows(shape: KvShape, capacity_bytes: int, *, copies: int = 1) -> int:
    """Number of sequences whose states, in `copies`, fit beside the keys and values of a medium
    sequence each; 0 without recurrent layers."""
    if shape.states is None:
        return 0
    each = copies * shape.state_bytes + _TOKENS_OF_STATES * shape.token_bytes
    return capacity_bytes // each
