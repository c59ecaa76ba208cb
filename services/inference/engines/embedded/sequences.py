"""The requests of a decode instance, waiting or running: data and state of each answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from forge.core.placement.prefix_cache import Match
from forge.core.routes import RouteSpan
from services.inference.engines.base import Finish, Prompt, Tokens
from services.inference.engines.embedded.arrivals import ArrivedTensors
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.shared_prefixes import Branch
from services.inference.engines.embedded.messages import Deliver
from services.inference.engines.embedded.model.sampler import DrawnToken, tokens_of
from services.inference.engines.grammar_masks import Matcher

STREAM_INTERVAL_S = 0.05
"""Shortest time between two pieces of a streamed request."""
CHECKPOINT_TOKENS = 64
"""Tokens in a piece of an unstreamed request; a crash loses at most so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A prompt's keys and values: the cached part and the fetched part."""

    cached: Match
    fetched: ArrivedTensors
    pinned: bool
    """Whether `cached` has a pin of its own, beside those of the sequence's `prompt_blocks`."""

    @property
    def nbytes(self) -> int:
        """Memory of the fetched part; a part of a held prompt keeps all of it."""
        recurrent = self.fetched.recurrent
        states = 0 if recurrent is None else recurrent.nbytes
        return self.fetched.kv.untyped_storage().nbytes() + states


@dataclass(frozen=True, slots=True)
class Reservation:
    """A pinned prefix of a request that fetches its other keys and values."""

    match: Match
    version: int
    """Version of the weights that computed the prefix."""
    epoch: int
    """Number of swaps before it."""


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeSequence(Branch):
    """A waiting or running request."""

    prompt: Prompt
    stream: bool
    deliver: Deliver
    asked_s: float
    sampled: array[int]
    """All sampled tokens, the first from prefill; the slabs do not have the last one yet."""
    most_sampled: int
    version: int
    """Version of all its keys and values."""
    epoch: int
    """Number of swaps before its prefix was pinned: a later one has emptied the cache."""
    arrived: Arrived | None
    """Set until it has its row."""
    matcher: Matcher | None
    state: torch.Tensor | None = None
    """The model's hidden state that gave the last sampled token, [channels]; None if unknown."""
    began_s: float = 0.0
    sent_s: float = 0.0
    unsent: list[tuple[DrawnToken, int]] = field(default_factory=list)
    """Tokens with the version of the weights that sampled each."""
    kv_shape: KvShape
    routes: bytearray = field(default_factory=bytearray)
    """Experts of all tokens from `routes_start` on that have been computed, a row each."""
    routes_start: int = 0
    routes_sent: int = 0
    """The first token whose experts the caller does not have."""

    @property
    def ids(self) -> bytes:
        """Prompt and answer."""
        return self.prompt.ids + self.sampled.tobytes()

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self.prompt.tokens + len(self.sampled)

    @property
    def left(self) -> int:
        """Most tokens that are still to be sampled."""
        return self.most_sampled - len(self.sampled)

    def answer_with(self, drafts: Sequence[int]) -> Sequence[int]:
        """The answer with drafts behind it, as the sampler needs it: for reweightings alone."""
        if self.prompt.sampling.reweighting is None or not drafts:
            return self.sampled
        return [*self.sampled, *drafts]

    def finish_with(self, token: int, *, sampled: int) -> Finish | None:
        """Whether the answer ends with this token, its `sampled`-th."""
        if token in self.prompt.sampling.stop_ids:
            return Finish.STOP
        if sampled >= self.most_sampled:
            return Finish.LENGTH
        return None

    def is_due(self, now_s: float) -> bool:
        """Whether the unsent tokens are to be sent."""
        if self.stream:
            return now_s - self.sent_s >= STREAM_INTERVAL_S
        return len(self.unsent) >= CHECKPOINT_TOKENS

    def take_unsent(self) -> Tokens:
        """Return the unsent tokens as columns, and forget them."""
        unsent, self.unsent = self.unsent, []
        return replace(tokens_of(unsent, self.prompt.sampling), routes=self._unsent_routes())

    def _unsent_routes(self) -> RouteSpan | None:
        if self.prompt.sampling.routes_from is None or not self.routes:
            return None
        start = self.routes_sent
        first = (start - self.routes_start) * self.kv_shape.route_bytes
        rows = bytes(self.routes[first:])
        self.routes_sent += len(rows) // self.kv_shape.route_bytes
        return self.kv_shape.route_span(rows, start=start)

    def all_routes(self) -> torch.Tensor:
        """Experts of the tokens of its row, for a cache; [tokens, route_bytes]."""
        found = self.kv_shape.unknown_routes(self.tokens)
        size = self.kv_shape.route_bytes
        if size and self.routes:
            rows = torch.frombuffer(self.routes, dtype=torch.uint8).view(-1, size)
            skipped = max(0, self.base - self.routes_start)
            at = max(0, self.routes_start - self.base)
            rows = rows[skipped : skipped + len(found) - at]
            found[at : at + len(rows)] = rows
        return found
