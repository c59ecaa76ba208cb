"""The experts that a mixture of experts chose for tokens, as an engine recorded them.

Owns the column of routes: unsigned little-endian numbers [tokens, layers, top_k], and the places of
its rows in a sequence. Routes travel, are stored and are cut as bytes. Not here: recording and
replay (`forge.rl.routing`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forge.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """The routers of a model."""

    layers: int
    """Layers with experts to choose from."""
    top_k: int
    """Experts per token in each."""
    experts: int
    """Experts of a layer, the most of all layers."""

    @property
    def id_bytes(self) -> int:
        """The least width of an expert's number. With one expert per token the largest number of
        the width is no expert: it would look like a row that is not known."""
        return 1 if self.experts <= (256 if self.top_k > 1 else 255) else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.id_bytes

    def span(self, rows: bytes, *, start: int) -> RouteSpan | None:
        """Rows of the tokens from `start` on; None without any."""
        if not rows:
            return None
        column = Routes(ids=rows, layers=self.layers, top_k=self.top_k, id_bytes=self.id_bytes)
        return RouteSpan(start=start, tokens=column.tokens, routes=column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Routes of consecutive tokens."""

    ids: bytes
    """[tokens, layers, top_k]; layers without experts have no entry."""
    layers: int
    top_k: int
    id_bytes: int
    """Bytes of one number, 1 or 2."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.id_bytes

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return len(self.ids) // self.row_bytes

    def check(self) -> None:
        """Raises `InvalidArgument` for a shape that has no rows, and for a part of a row."""
        if self.layers < 1 or self.top_k < 1 or self.id_bytes not in (1, 2):
            raise InvalidArgument(
                f"routed_experts has layers = {self.layers}, top_k = {self.top_k}, id_bytes = "
                f"{self.id_bytes}; needed are at least 1, at least 1, and 1 or 2"
            )
        if len(self.ids) % self.row_bytes:
            raise InvalidArgument(
                f"routed_experts has {len(self.ids)} bytes: not a whole number of rows of "
                f"{self.row_bytes} bytes"
            )

    def rows(self, start: int, end: int | None = None) -> Routes:
        """The rows from `start` to `end`."""
        size = self.row_bytes
        stop = None if end is None else end * size
        return replace(self, ids=self.ids[start * size : stop])

    def fits(self, other: Routes) -> bool:
        """Whether rows of both have one shape."""
        shape = (self.layers, self.top_k, self.id_bytes)
        return shape == (other.layers, other.top_k, other.id_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpan:
    """Rows of a column that belong to consecutive tokens of a sequence."""

    start: int
    """First token of the sequence."""
    tokens: int
    routes: Routes
    """A column that several sequences may share."""
    first_row: int = 0
    """Row of the first token."""

    @property
    def end(self) -> int:
        """The token behind the last one."""
        return self.start + self.tokens

    def until(self, end: int) -> RouteSpan | None:
        """The part before the token `end`; None if it is empty."""
        tokens = min(self.tokens, end - self.start)
        return replace(self, tokens=tokens) if tokens > 0 else None
