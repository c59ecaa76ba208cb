"""Messages of the actors of the embedded engine: of the one that reads prompts, of both, and of the
one that decodes; and the prompt that goes from one to the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from forge.core.errors import ForgeError
from services.inference.engines.base import KvSpan, Piece, Prefilled, Probe, Prompt, Tokens
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.model.policy import Policy, StagedWeights
from services.inference.engines.embedded.model.probe import adopt
from services.inference.engines.embedded.stored_kv import StoredKv, StoredPrefix
from services.inference.engines.grammar_masks import Matcher

Deliver = Callable[[Piece | ForgeError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPrompt:
    """A prompt with all its keys and values; immutable."""

    prefilled: Prefilled
    kv: torch.Tensor
    """[layers, 2, heads, tokens, head_size]."""
    routes: torch.Tensor
    """[tokens, route_bytes]."""
    version: int
    state: torch.Tensor | None = None
    """The last token's hidden state; None without draft heads."""
    recurrent: torch.Tensor | None = None
    """States of the recurrent layers after the last token, uint8 [1, state_bytes]; None without
    such layers."""

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and states."""
        return self.kv.nbytes + (0 if self.recurrent is None else self.recurrent.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """A prompt that is still computed; its first `tokens` tokens do not change any more."""

    kv: torch.Tensor
    """[layers, 2, heads, tokens, head_size], of the whole prompt."""
    tokens: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Tell: read a prompt; calls `deliver` on the event loop, unless it is aborted before, and
    `progress` after each of its passes but the last."""

    prompt: Prompt
    asked_s: float
    """Monotonic time of the request."""
    deliver: Callable[[HeldPrompt | ForgeError], None]
    progress: Callable[[PartRead], None] | None = None
    matcher: Matcher | None = None
    """State of the grammar at the start of the answer."""
    stored: StoredPrefix | None = None
    """Blocks of the prompt from the KV store; only this reading has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Tell: serve these weights; calls `deliver` on the event loop when they are served. With
    UnfitWeights or BrokenWeights when they compute something else than `probe`, or nothing; then
    the served ones stay."""

    weights: StagedWeights
    deliver: Callable[[ForgeError | None], None]
    probe: Probe | None = None
    kv_identity: bytes = b""
    """Name of the model with these weights in a KV store; empty without a store."""

    def serve(self, policy: Policy, cache: KvCache, stored: StoredKv | None) -> ForgeError | None:
        """Serve the weights; their prefixes are computed anew. Returns why they are refused."""
        try:
            adopt(policy, self.weights, self.probe)
        except ForgeError as error:
            return error
        cache.clear()
        if stored is not None:
            stored.store.serve(self.kv_identity)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Ask: number of cached tokens of the prompt; pinned until Join or Abort."""

    prompt: Prompt
    cached: bool = True
    """False: reserve nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Ask: sample this request; calls `deliver` on the event loop, last with a finish."""

    prompt: Prompt
    first: Tokens
    span: KvSpan
    """Keys and values after the reserved ones."""
    stream: bool
    asked_s: float
    deliver: Deliver
    matcher: Matcher | None = None
    """State of the grammar after `first`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Tell: drop a request in any state."""

    request_id: str
