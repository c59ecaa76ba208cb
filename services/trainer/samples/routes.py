"""The recorded experts of each turn's sequence, put together from the turns that computed it.

A token has the experts of the first turn that computed it: of the turn that has it as a new token,
or, for a turn's last token, of the first turn that continues there.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.errors import InvalidArgument
from forge.core.routes import RouteSpan
from forge.core.trajectory import NO_PARENT
from forge.runtime.rpc.routes import clipped, read_routes
from forge.v1 import common_pb2 as pb

_ALL = 1 << 62

Spans = tuple[RouteSpan, ...]


def routes_of(turns: Sequence[pb.Turn], lengths: Sequence[int]) -> list[Spans]:
    """The spans of each turn's sequence, ascending and disjoint; `lengths` are those of the
    sequences. Malformed records count as none: pools of earlier releases did not check them."""
    own = [_own(turn) for turn in turns]
    found: list[Spans] = []
    for index, turn in enumerate(turns):
        column, parent = own[index], turn.parent_turn
        inherited: Spans = ()
        if parent != NO_PARENT:
            if turn.prefix_tokens == lengths[parent]:
                # The parent's last token was computed first by this turn.
                found[parent] = _behind(found[parent], column, until=lengths[parent])
            cut = (span.until(turn.prefix_tokens) for span in found[parent])
            inherited = tuple(span for span in cut if span is not None)
        found.append(_behind(inherited, column, until=lengths[index]))
    return found


def _own(turn: pb.Turn) -> RouteSpan | None:
    try:
        return read_routes(turn.sampled.routed_experts)
    except InvalidArgument:
        return None


def _behind(spans: Spans, column: RouteSpan | None, *, until: int) -> Spans:
    """The spans, and the rows of a column behind them."""
    if column is None:
        return spans
    start = spans[-1].end if spans else 0
    rest = clipped(column, start=start, end=until, most_bytes=_ALL)
    return spans if rest is None else (*spans, rest)
