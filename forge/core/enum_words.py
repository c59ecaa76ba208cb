"""Names of enum values of the protos, also of values that a newer peer has added.

`Enum.Name` raises on those: a message keeps the number of an unknown value.
"""

from __future__ import annotations

from typing import Any

_ZERO = "UNSPECIFIED"


def enum_name(enum: Any, number: int) -> str:
    """Return the name of a value of an enum wrapper of protobuf, such as `FINISH_REASON_STOP`; for
    a number that this release does not know, such as `FINISH_REASON_UNKNOWN_9`."""
    known = enum.DESCRIPTOR.values_by_number
    if number in known:
        return str(known[number].name)
    return f"{_prefix(enum)}UNKNOWN_{number}"


def enum_word(enum: Any, number: int) -> str:
    """Return the name without the prefix of its enum, in lower case: `stop`, `unknown_9`."""
    return enum_name(enum, number).removeprefix(_prefix(enum)).lower()


def _prefix(enum: Any) -> str:
    return str(enum.DESCRIPTOR.values_by_number[0].name).removesuffix(_ZERO)
