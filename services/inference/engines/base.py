"""What the service asks of an engine, whatever it runs on.

A prefill engine reads prompts, a decode engine samples; the same engine package gives both. Knows
neither gRPC nor torch, so that a router can import it and an engine with its own runtime can
implement it. Token ids are int32 little-endian bytes, as on the wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from forge.core.errors import ForgeError
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.actor_system import ActorSystem


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the answer must match; an engine masks what cannot lead to a match."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    lenient: bool = False
    """Ignore what of a JSON Schema cannot be enforced."""
    matched_tokens: int = 0
    """Tokens at the end of the prompt that belong to the answer already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw; every field is in range already."""

    temperature: float
    """0 takes the likeliest token."""
    top_p: float
    top_k: int
    """0 keeps all."""
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    """The draw at a position depends on this seed and the position alone."""
    grammar: Grammar | None = None
    """Applied before all other cuts; there are `stop_ids` then, and they can be drawn only where
    the answer is complete."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to tell with each sampled one."""

    @property
    def leaves_out(self) -> bool:
        """Whether a grammar or a cut leaves tokens out: then the share that is left is told."""
        return self.grammar is not None or self.top_k > 0 or self.top_p < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request."""

    request_id: str
    ids: bytes
    sampling: Sampling

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids) // TOKEN_BYTES


Likeliest = tuple[tuple[int, float], ...]
"""Tokens and their log-probs in the distribution drawn from, the likeliest first; -inf for what a
cut or a grammar leaves out. Of a greedy token at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Columns over sampled tokens, in order."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of the distribution drawn from."""
    versions: tuple[int, ...] = ()
    """Weights that sampled each."""
    allowed: tuple[float, ...] = ()
    """The log of the share of probability that grammar, top_k and top_p left; empty without any of
    them."""
    top: tuple[Likeliest, ...] = ()
    """With `top_logprobs`: that many for each token, or the whole vocabulary; else empty."""


class Finish(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The outcome of reading one prompt; its keys and values are held until released."""

    first: Tokens
    """Exactly one token."""
    cached_tokens: int
    """Of the prompt, not computed for this request."""
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """Keys and values of consecutive tokens over all layers, in memory order."""

    from_token: int
    tokens: int
    version: int
    """Of the weights that computed it."""
    dtype: str
    shape: tuple[int, ...]
    """[layers, 2, kv_heads, tokens, head_size]."""
    data: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Newly sampled tokens of one request."""

    tokens: Tokens
    finish: Finish | None = None
    """Set on the last one, as are the times."""
    queue_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor as it travels."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Weights and load of an engine."""

    version: int
    """0 before any weights are loaded."""
    running: int
    queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the model that requests are checked against."""

    context_tokens: int
    """Prompt and answer together."""
    vocabulary: int


class UnfitWeights(ForgeError):
    """The weights on offer are not this model's; the message says what differs."""

    code = "FAILED_PRECONDITION"


class BrokenWeights(ForgeError):
    """The model computed something that is not a number; the message names the weights."""


FetchKv = Callable[[int], Awaitable[KvSpan]]
"""Brings a prompt's keys and values from a token on, from wherever it was prefilled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Model, device and limits of one engine, from the settings of the worker."""

    model_path: str
    """Folder with the model's config.json."""
    dtype: str = "auto"
    device: str = "cpu"
    context_tokens: int = 0
    """Prompt and answer together; 0: the model's own limit."""
    threads: int = 1
    block_tokens: int = 16
    """Prefixes are cached in blocks of this many tokens."""
    cache_bytes: int = 512 << 20
    """Memory for the prefix cache."""
    kv_bytes: int = 2 << 30
    """Memory for running sequences (decode) or held prompts (prefill)."""
    pass_tokens: int = 4096
    """Most tokens of one prefill pass."""
    max_running: int = 128
    """Most requests that sample at the same time."""
    request_timeout_s: float = 600.0


class Engine(Protocol):
    """Contract of both roles."""

    limits: ModelLimits

    @property
    def cache_tokens(self) -> int:
        """Capacity of the prefix cache; the router's prefix index has the same."""

    async def load(self, tensors: Mapping[str, NamedTensor], *, version: int) -> None:
        """Serve these weights from the next step on; requests in flight go on with them.

        All of them or none: UnfitWeights leaves the engine as it was. Empties prefix caches.
        """

    def status(self) -> EngineStatus:
        """Return version and load."""

    async def idle(self) -> None:
        """Return once nothing is running and nothing is held for others."""

    async def close(self) -> None:
        """Stop the engine."""


class PrefillEngine(Engine, Protocol):
    """Contract of the prefill role."""

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        """Read the prompt and sample its first token, once there is room to hold it.

        Raises ResourceExhausted for one too long to be held at all, Unavailable without weights,
        InvalidArgument for a grammar that does not compile: nothing has been read then.
        """

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        """NotFound when it was released or held for too long."""

    def release(self, request_id: str) -> None:
        """Forget a held prompt; nothing happens when it is unknown."""


class DecodeEngine(Engine, Protocol):
    """Contract of the decode role."""

    capacity: int
    """Most requests that sample at the same time; more wait."""

    def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        """Sample after `first`, which prefill did; the last piece has a finish reason.

        Closing the iterator aborts the request before the next step. Raises ResourceExhausted when
        its keys and values no longer fit and it had to give way: prefill it again.
        """


class EngineProvider(Protocol):
    """Starts an engine for one role: a module, or an object, that an entry point names.

    An actor of `actors` that fails for good ends the worker with exit code 1.
    """

    async def start_prefill(self, actors: ActorSystem, options: EngineOptions) -> PrefillEngine:
        """Build the model without weights. Raises ConfigError for options it does not support."""

    async def start_decode(self, actors: ActorSystem, options: EngineOptions) -> DecodeEngine:
        """Build the model without weights. Raises ConfigError for options it does not support."""
