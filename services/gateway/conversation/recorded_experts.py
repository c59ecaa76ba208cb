"""Records the experts of a turn's tokens: those that earlier turns lack, up to a limit."""

from __future__ import annotations

from forge.runtime.rpc.routes import clipped, read_routes, write_routes
from forge.v1 import common_pb2

MAX_TURN_BYTES = 16 << 20
"""Most experts of one turn, a quarter of the pool's default limit of a turn; the first tokens
beyond it have none."""


def record_experts(turn: common_pb2.Turn, routed: common_pb2.RoutedExperts, *, length: int) -> None:
    """Sets the experts of a turn: from the last token of its shared prefix on, which no earlier
    turn computed, to the end of its sequence of `length` tokens."""
    span = read_routes(routed)
    start = max(0, turn.prefix_tokens - 1)
    kept = span and clipped(span, start=start, end=length, most_bytes=MAX_TURN_BYTES)
    if kept is not None:
        turn.sampled.routed_experts.CopyFrom(write_routes(kept))
