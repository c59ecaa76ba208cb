"""Recorded experts on the wire: joined, cut, split and checked."""

from __future__ import annotations

import pytest

from forge.core.errors import InvalidArgument
from forge.runtime.rpc.routes import check_routes, clipped, joined_routes, read_routes
from forge.runtime.rpc.tokens import joined, split
from forge.v1.common_pb2 import RoutedExperts, SampledTokens


def routed(first: int, rows: range, *, top_k: int = 2) -> RoutedExperts:
    """Two layers; each number of a row is the row's."""
    ids = bytes(row for row in rows for _ in range(2 * top_k))
    return RoutedExperts(ids=ids, layers=2, top_k=top_k, id_bytes=1, first_token=first)


def test_consecutive_rows_join() -> None:
    """Messages without rows between them change nothing."""
    whole = joined_routes([routed(3, range(2)), RoutedExperts(), routed(5, range(2, 6))])
    assert whole == routed(3, range(6))
    assert joined_routes([RoutedExperts()]) is None


@pytest.mark.parametrize(
    "later", [routed(6, range(9, 11)), routed(4, range(9, 11)), routed(5, range(9, 11), top_k=1)]
)
def test_rows_before_a_gap_are_dropped(later: RoutedExperts) -> None:
    """After a gap, an overlap or another shape only the later rows fit into one message."""
    assert joined_routes([routed(3, range(2)), later]) == later


def test_clip_keeps_the_last_rows() -> None:
    """Within tokens and bytes."""
    span = read_routes(routed(3, range(10)))
    assert span is not None
    kept = clipped(span, start=5, end=12, most_bytes=1 << 20)
    assert kept is not None and (kept.start, kept.end, kept.first_row) == (5, 12, 2)
    kept = clipped(span, start=0, end=12, most_bytes=9)
    assert kept is not None and (kept.start, kept.end) == (10, 12)
    assert clipped(span, start=13, end=20, most_bytes=100) is None


@pytest.mark.parametrize("tokens", [0, 3])
def test_large_records_travel_in_messages_of_their_own(tokens: int) -> None:
    """Split and joined again, tokens and rows are the same; no message exceeds the limit."""
    sampled = SampledTokens(
        ids=bytes(4 * tokens),
        logprobs=bytes(4 * tokens),
        weight_versions=bytes(4 * tokens),
        routed_experts=routed(0, range(200)),
    )
    parts = list(split(sampled, max_bytes=100))
    assert len(parts) >= 8
    assert all(len(part.routed_experts.ids) <= 100 for part in parts)
    assert joined(parts) == sampled


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (routed(3, range(3)), r"tokens \[3, 6\) of a sequence of 5"),
        (RoutedExperts(ids=b"abc", layers=1, top_k=2, id_bytes=1), "whole number of rows"),
        (RoutedExperts(ids=b"ab", layers=0, top_k=2, id_bytes=1), "layers = 0"),
    ],
)
def test_wrong_records_are_refused(message: RoutedExperts, words: str) -> None:
    """With the numbers."""
    with pytest.raises(InvalidArgument, match=words):
        check_routes(message, tokens=5)
