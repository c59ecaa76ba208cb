"""Values that processes store in etcd as JSON objects."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from forge.core.errors import DataLoss

T = TypeVar("T")


def decode_stored(value: bytes, kind: type[T], name: str) -> T:
    """The object of this type. Raises `DataLoss`, which calls it `name`, for other bytes."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataLoss(f"{name} is unreadable: {error}") from error
