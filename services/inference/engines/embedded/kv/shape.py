"""The shape of a model's keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forge.core.routes import RouteShape, RouteSpan
from services.inference.engines.base import KvSpan
from services.inference.engines.embedded.recurrent.shape import StateShape
from services.inference.engines.refusals import refused
from services.inference.engines.tensor_bytes import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Shape, type and device of the keys and values of one token."""

    layers: int
    windowed: bool
    """Whether some layer has a sliding window, caps its logits or has sinks: two reads cannot be
    merged."""
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    groups: int = 1
    """Query heads of a key-value head."""
    fingerprint: bytes = b""
    """Names the model's architecture; see `KvSpan`."""
    routes: RouteShape | None = None
    """The routers of a model whose experts are recorded."""
    attends: bool = True
    """False for a model without attention: each token then has one value, which is zero."""
    states: StateShape | None = None
    """Shape of the states of recurrent layers, if there are any."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent layers' states after one token; 0 without such layers."""
        return 0 if self.states is None else self.states.bytes

    @property
    def route_bytes(self) -> int:
        """Bytes of the experts of one token; 0 if they are not recorded."""
        return 0 if self.routes is None else self.routes.row_bytes

    def unknown_routes(self, tokens: int) -> torch.Tensor:
        """Rows of tokens whose experts are not known: [tokens, route_bytes], on the host."""
        return torch.full((tokens, self.route_bytes), 255, dtype=torch.uint8)

    def route_span(self, rows: bytes, *, start: int) -> RouteSpan | None:
        """Rows of the tokens from `start` on, for a caller; None without any."""
        return self.routes.span(rows, start=start) if self.routes is not None else None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * 2 * self.heads * self.head_size * self.dtype.itemsize

    def check(self, span: KvSpan, *, from_token: int, to_token: int) -> None:
        """Raises RefusedHandOff unless `span` has the tokens `from_token` to `to_token` of this
        model."""
        if span.fingerprint and self.fingerprint and span.fingerprint != self.fingerprint:
            raise refused("model", "the hand-off is of another model")
        place = (span.from_token, span.from_token + span.tokens)
        if place != (from_token, to_token):
            raise refused(
                "place",
                f"the hand-off has the tokens {place[0]} to {place[1]}; the request lacks "
                f"{from_token} to {to_token}",
            )
        wanted = (self.layers, 2, self.heads, span.tokens, self.head_size)
        size = span.tokens * self.token_bytes
        has = len(span.data) if span.kept is None else size
        found = (span.dtype, tuple(span.shape), has)
        if found != (NAMES[self.dtype], wanted, size):
            raise refused(
                "shape",
                f"the hand-off is {span.dtype} {list(span.shape)} in {has} bytes; this "
                f"model has {NAMES[self.dtype]} {list(wanted)} in {size} bytes",
            )
        if span.routes and len(span.routes) != span.tokens * self.route_bytes:
            raise refused(
                "shape",
                f"the hand-off has {len(span.routes)} bytes of experts; {span.tokens} tokens of "
                f"this model have {span.tokens * self.route_bytes}",
            )
        if span.kept is None and len(span.recurrent) != self.state_bytes:
            raise refused(
                "shape",
                f"the hand-off has {len(span.recurrent)} bytes of recurrent states; this model has "
                f"{self.state_bytes}",
            )

    def empty(self, tokens: int) -> torch.Tensor:
        """Allocate one sequence: [layers, 2, heads, tokens, head_size]."""
        allocate = torch.empty if self.attends else torch.zeros
        return allocate(
            (self.layers, 2, self.heads, tokens, self.head_size),
            dtype=self.dtype,
            device=self.device,
        )
