"""Items grouped by count and bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.runtime.rpc.chunks import chunked


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ([], []),
        ([9], [[9]]),
        ([2, 2, 1], [[2, 2, 1]]),
        ([3, 2, 1], [[3, 2], [1]]),
        ([9, 1, 9, 9], [[9], [1], [9], [9]]),
        ([1, 1, 1, 1], [[1, 1, 1], [1]]),
    ],
)
def test_chunks_are_filled_up_to_their_limits(sizes, chunks):
    """At most three items and five bytes; a larger item is alone."""
    assert list(chunked(sizes, size_of=int, max_items=3, max_bytes=5)) == chunks


@given(st.lists(st.integers(0, 9)), st.integers(0, 4))
def test_chunks_hold_every_item_in_order(sizes, max_items):
    """None is empty, and none is larger than allowed unless it has one item."""
    chunks = list(chunked(sizes, size_of=int, max_items=max_items, max_bytes=8))
    assert [size for chunk in chunks for size in chunk] == sizes
    for chunk in chunks:
        assert len(chunk) == 1 or sum(chunk) <= 8
        assert 0 < len(chunk) <= (max_items or len(sizes))
