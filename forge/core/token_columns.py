"""Columns of tokens: little-endian int32 and float32 bytes, one entry per token.

Owns the conversion from and to numbers, their range, and the comparison of two columns of ids.
Columns travel, are stored and are compared as bytes; only computations unpack the numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)
TOKEN_BYTES = 4
"""Bytes of one entry: an int32 id, a float32 log-prob, an int32 weight version."""
_BIG_ENDIAN = sys.byteorder == "big"


def int32_array(data: bytes | memoryview) -> array[int]:
    """The numbers in a little-endian int32 column."""
    return _from_column(array("i"), data)


def int32_bytes(values: Iterable[int]) -> bytes:
    """A little-endian int32 column of `values`."""
    return _to_column(array("i", values))


def float32_array(data: bytes | memoryview) -> array[float]:
    """The numbers in a little-endian float32 column."""
    return _from_column(array("f"), data)


def float32_bytes(values: Iterable[float]) -> bytes:
    """A little-endian float32 column of `values`."""
    return _to_column(array("f", values))


def _from_column(numbers: array[Number], data: bytes | memoryview) -> array[Number]:
    numbers.frombytes(data)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers


def _to_column(numbers: array[Number]) -> bytes:
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def are_below(column: bytes, limit: int) -> bool:
    """Return whether all numbers of an int32 column are from 0 to `limit` - 1.

    Computes with the column as one large integer of 32 bits for each number: a loop over the
    numbers takes four times as long.
    """
    numbers = int.from_bytes(column, "little")
    ones = int.from_bytes(b"\1\0\0\0" * (len(column) // TOKEN_BYTES), "little")
    # Bit 31 is set in negative numbers, and in the sums of numbers that are not below the limit.
    sums = numbers + ones * ((1 << 31) - limit)
    return not (numbers | sums) & (ones << 31)


def outside(column: bytes, limit: int) -> int | None:
    """Return a number of an int32 column that is not from 0 to `limit` - 1; None if there is none.

    The lowest if that is negative, else the highest.
    """
    return None if are_below(column, limit) else number_outside(int32_array(column), limit)


def number_outside(numbers: Sequence[int], limit: int) -> int | None:
    """As `outside`, for numbers that are no column; cheaper than to make one of them."""
    if not numbers:
        return None
    if (lowest := min(numbers)) < 0:
        return lowest
    highest = max(numbers)
    return highest if highest >= limit else None


def common_tokens(left: bytes, right: bytes) -> int:
    """Return the number of leading ids that two sequences share."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    # The usual cases first: all ids agree, or none.
    if left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        return high
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0
    while low + 1 < high:
        middle = (low + high) // 2
        span = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if left[span] == right[span]:
            low = middle
        else:
            high = middle
    return low
