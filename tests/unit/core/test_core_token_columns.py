"""Columns of tokens: the range of their numbers."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from forge.core.token_columns import are_below, int32_bytes

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(numbers=st.lists(INT32 | st.integers(0, 9), max_size=40), limit=st.integers(1, 2**31))
@example(numbers=[0, 9], limit=10)
@example(numbers=[10, 0], limit=10)
@example(numbers=[-1, 0], limit=10)
@example(numbers=[-(2**31), 2**31 - 1], limit=2**31)
@example(numbers=[2**31 - 1, 2**31 - 1], limit=2**31)
def test_range_of_a_column_is_that_of_its_numbers(numbers: list[int], limit: int) -> None:
    """No number changes the result for its neighbour."""
    assert are_below(int32_bytes(numbers), limit) is all(0 <= one < limit for one in numbers)
