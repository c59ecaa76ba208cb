"""Futures of waiting callers."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


def settle(future: asyncio.Future[T] | None, outcome: T | BaseException) -> None:
    """End a future with its result, or with an error, which is raised in the waiting caller.

    Without effect on a future that has ended: its caller may have left.
    """
    if future is None or future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
