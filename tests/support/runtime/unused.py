"""An argument that the tested code must not use."""

from __future__ import annotations

from typing import Any, TypeVar, cast

T = TypeVar("T")


class _Unused:
    def __init__(self, kind: type[object]) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the test passes no {self._kind.__name__}: {name} was read")


def unused(kind: type[T]) -> T:
    """Return a stand-in for `kind` that fails the test at the first use."""
    return cast(T, _Unused(kind))
