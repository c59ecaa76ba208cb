"""What the pool reads out of the bytes of a column, held against reading every number."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import InvalidArgument
from forge.core.token_columns import float32_bytes, int32_bytes
from services.pool.validation import new_turn
from tests.support.pool.records import make_turn

INT32 = st.integers(min_value=-(2**31), max_value=2**31 - 1)
FLOAT32 = st.floats(width=32) | st.sampled_from([math.inf, -math.inf, math.nan, 3.4e38, -1e-45])


def checked(*, ids=(4,), logprobs=None, versions=None):
    """The head of a turn with these columns."""
    turn = make_turn(sampled=[0] * len(ids))
    turn.sampled.ids = int32_bytes(ids)
    if logprobs is not None:
        turn.sampled.logprobs = float32_bytes(logprobs)
    if versions is not None:
        turn.sampled.weight_versions = int32_bytes(versions)
    return new_turn(turn.SerializeToString()).head


@given(st.lists(INT32, min_size=1, max_size=8))
def test_negative_id_is_refused_at_any_position(ids):
    """The error names the lowest."""
    if min(ids) >= 0:
        assert checked(ids=ids).sampled_tokens == len(ids)
    else:
        with pytest.raises(InvalidArgument, match=rf"sampled.ids holds {min(ids)},"):
            checked(ids=ids)


@given(st.lists(FLOAT32, min_size=1, max_size=8))
def test_logprobs_must_be_finite(logprobs):
    """Any finite number passes, any other is refused at any position."""
    if all(math.isfinite(value) for value in logprobs):
        assert checked(ids=[1] * len(logprobs), logprobs=logprobs).sampled_tokens == len(logprobs)
    else:
        with pytest.raises(InvalidArgument, match="not finite"):
            checked(ids=[1] * len(logprobs), logprobs=logprobs)


def test_nan_of_any_bits_is_refused():
    """Quiet or signaling, of either sign."""
    for bits in (0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000):
        turn = make_turn(sampled=[1, 2])
        turn.sampled.logprobs = struct.pack("<fI", -0.5, bits)
        with pytest.raises(InvalidArgument, match="not finite"):
            new_turn(turn.SerializeToString())


@given(st.lists(st.integers(min_value=0, max_value=5), max_size=8))
def test_version_range_is_lowest_and_highest(versions):
    """-1 if no token was sampled."""
    head = checked(ids=[1] * len(versions), versions=versions)
    expected = (min(versions, default=-1), max(versions, default=-1))
    assert (head.min_weight_version, head.max_weight_version) == expected
