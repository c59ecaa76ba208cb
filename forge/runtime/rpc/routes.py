"""Recorded experts on the wire: conversion, joining, cutting.

A message has rows of consecutive tokens of a sequence, from `first_token` on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forge.core.errors import InvalidArgument
from forge.core.routes import Routes, RouteSpan
from forge.v1.common_pb2 import RoutedExperts


def write_routes(span: RouteSpan) -> RoutedExperts:
    """Encode the rows of a span."""
    column = span.routes
    return RoutedExperts(
        ids=column.rows(span.first_row, span.first_row + span.tokens).ids,
        layers=column.layers,
        top_k=column.top_k,
        id_bytes=column.id_bytes,
        first_token=span.start,
    )


def read_routes(message: RoutedExperts) -> RouteSpan | None:
    """Decode rows; None for none. Raises `InvalidArgument` for a malformed message."""
    if not message.ids:
        return None
    column = Routes(
        ids=message.ids, layers=message.layers, top_k=message.top_k, id_bytes=message.id_bytes
    )
    column.check()
    return RouteSpan(start=message.first_token, tokens=column.tokens, routes=column)


def joined_routes(messages: Iterable[RoutedExperts]) -> RoutedExperts | None:
    """The rows of all messages in order; None without any.

    Rows before a gap, an overlap or a change of the shape are dropped: the answer moved to another
    engine, and only consecutive rows fit into one message.
    """
    parts: list[RouteSpan] = []
    for message in messages:
        span = read_routes(message)
        if span is None:
            continue
        if parts and not (parts[-1].end == span.start and parts[-1].routes.fits(span.routes)):
            parts.clear()
        parts.append(span)
    if not parts:
        return None
    whole = write_routes(parts[0])
    whole.ids = b"".join(part.routes.ids for part in parts)
    return whole


def clipped(span: RouteSpan, *, start: int, end: int, most_bytes: int) -> RouteSpan | None:
    """The rows of the tokens from `start` to `end`, at most so many bytes of them, the last ones;
    None if none are left."""
    rows = most_bytes // span.routes.row_bytes
    first = max(span.start, start, min(span.end, end) - rows)
    tokens = min(span.end, end) - first
    if tokens <= 0:
        return None
    skipped = span.first_row + first - span.start
    return RouteSpan(start=first, tokens=tokens, routes=span.routes, first_row=skipped)


def split_routes(message: RoutedExperts, *, max_bytes: int) -> Iterator[RoutedExperts]:
    """Yield messages of at most `max_bytes` of rows, or of one row."""
    span = read_routes(message)
    if span is None:
        return
    rows = max(1, max_bytes // span.routes.row_bytes)
    for start in range(0, span.tokens, rows):
        part = span.routes.rows(start, start + rows)
        yield write_routes(RouteSpan(start=span.start + start, tokens=part.tokens, routes=part))


def check_routes(message: RoutedExperts, *, tokens: int) -> None:
    """Raises `InvalidArgument` for malformed rows, and for rows beyond a sequence of `tokens`."""
    span = read_routes(message)
    if span is not None and span.end > tokens:
        raise InvalidArgument(
            f"routed_experts has rows of the tokens [{span.start}, {span.end}) of a sequence of "
            f"{tokens} tokens"
        )
