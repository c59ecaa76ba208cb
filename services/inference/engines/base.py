"""The contract of engines.

A prefill engine reads prompts, a decode engine samples; an engine package provides both. Imports
neither gRPC nor torch, so that routers can import it and engines with their own runtime can
implement it. Token ids are int32 little-endian bytes, as on the wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from forge.core.errors import ForgeError, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.core.routes import RouteSpan
from forge.core.token_columns import TOKEN_BYTES
from services.inference.engines.capabilities import Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar for the answer; the engine masks all tokens that cannot lead to a match."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    lenient: bool = False
    """Ignore the parts of a JSON Schema that cannot be enforced."""
    matched_tokens: int = 0
    """Tokens at the end of the prompt that belong to the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reweighting:
    """Changes of the logits by the tokens so far and by token, before a grammar and all cuts."""

    presence: float = 0.0
    """Subtracted for each token that the answer has."""
    frequency: float = 0.0
    """Subtracted for each time that the answer has a token."""
    repetition: float = 1.0
    """Divides positive logits of tokens of prompt and answer, and multiplies negative ones."""
    bias: tuple[tuple[int, float], ...] = ()
    """Added value of the logits, by token id."""
    answered_tokens: int = 0
    """Tokens at the end of the prompt that belong to the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters, checked."""

    temperature: float
    """0: greedy."""
    top_p: float
    top_k: int
    """0: no limit."""
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    """Seed and position alone determine the draw at a position."""
    grammar: Grammar | None = None
    """Applied before all other cuts; needs `stop_ids`, which are allowed only after a complete
    answer."""
    top_logprobs: int = 0
    """Number of the likeliest tokens to return with each sampled one."""
    min_tokens: int = 0
    """Tokens to sample before a stop token is allowed."""
    min_p: float = 0.0
    """Tokens below this share of the likeliest one's probability are left out."""
    reweighting: Reweighting | None = None
    routes_from: int | None = None
    """Return the experts of each token from this index of the prompt on; None: of none. An engine
    without the ability returns none."""

    @property
    def reshapes(self) -> bool:
        """Whether the distribution may differ from the model's at this temperature; then
        `Tokens.allowed` is filled."""
        held = self.grammar is not None or self.min_tokens > 0
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return held or cuts or self.reweighting is not None


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
"""Tokens and their log-probs in the sampled distribution, the likeliest first; -inf for removed
tokens. For greedy sampling at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Columns over sampled tokens, in order."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-probs in the sampled distribution."""
    versions: tuple[int, ...] = ()
    """Version of the weights that sampled each."""
    allowed: tuple[float, ...] = ()
    """Log of each token's probability in the model's own distribution over that in the sampled one;
    without a reweighting this is the log of the probability mass that grammar, min_tokens and cuts
    have left. Empty without any of them."""
    top: tuple[Likeliest, ...] = ()
    """With `top_logprobs`: that many for each token, at most the vocabulary; else empty."""
    routes: RouteSpan | None = None
    """With `routes_from`: experts of tokens of prompt and answer, which continue those returned
    before. The last sampled token has none: it was not computed yet."""


class Finish(Enum):
    """Reason of the end of an answer."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Result of a prefill; the keys and values are held until released."""

    first: Tokens
    """Exactly one token."""
    cached_tokens: int
    """Tokens of the prompt that came from the prefix cache or the KV store."""
    queue_s: float
    prefill_s: float
    stored_tokens: int = 0
    """Part of `cached_tokens` that came from the KV store."""
    stored_s: float = 0.0
    """The part of `prefill_s` in which they were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """Keys and values of consecutive tokens over all layers, in memory order."""

    from_token: int
    tokens: int
    version: int
    """Version of the weights that computed it."""
    dtype: str
    shape: tuple[int, ...]
    """[layers, 2, kv_heads, tokens, head_size]."""
    data: bytes | memoryview
    last_state: bytes = b""
    """The model's last hidden state of the prompt's last token, in `dtype`, for draft heads; empty
    without any."""
    fingerprint: bytes = b""
    """Names the model's architecture and this layout; decode refuses another one. Empty: unknown,
    from an earlier release."""
    routes: bytes | memoryview = b""
    """With the end of the prompt: the experts of the tokens that the caller asked for, a row each,
    as the engine holds them; empty if they are not recorded, or from an earlier release."""
    first: Tokens | None = None
    """The token that prefill sampled, with the end of the prompt."""
    recurrent: bytes | memoryview = b""
    """With the end of the prompt: the states of the recurrent layers after it, as the engine holds
    them; empty for a model without such layers."""
    kept: object = None
    """From `local_kv` alone: the held prompt itself, in place of `data`, `last_state` and
    `recurrent`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Newly sampled tokens of one request."""

    tokens: Tokens
    finish: Finish | None = None
    """Set on the last piece, as are the times."""
    queue_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache; `AggregatedEngine.generate` sets it on the first piece,
    as `queue_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Weights and load of an engine."""

    version: int
    """0 before any weights are loaded."""
    running: int
    """Unfinished requests: those that wait and held prompts, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the model that requests are checked against."""

    context_tokens: int
    """Prompt and answer together."""
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Tokens, and their log-probs under a version of the weights."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of all tokens but the first, by the trainer's forward in float32."""
    published: tuple[float, ...] = ()
    """The same with the values as they are published, in 16 bits; may be empty."""
    most_error: float = 0.0
    """Largest mean error of log-probs of weights in 16 bits, in nats; 0: the engine's own limit."""
    most_exact_error: float = 0.0
    """The same where nothing is rounded; 0: the limit of the pass."""


class UnfitWeights(ForgeError):
    """The weights are of another model, or compute something else than at the trainer; the message
    names the difference."""

    code = "FAILED_PRECONDITION"


class RefusedHandOff(Unavailable):
    """Keys and values of a hand-off are damaged, or of another shape or place: prefill the prompt
    again. Nothing of them is kept."""


class OtherWeights(RefusedHandOff):
    """Keys and values of a hand-off continue a prefix of other weights: fetch them from token 0."""


class BrokenWeights(ForgeError):
    """The weights have or compute NaN or infinity; the message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChange:
    """A change of a prefix cache. Blocks have names of `forge.core.placement.chain_hashes`."""

    removed: Sequence[bytes] = ()
    """Happened before those that are stored."""
    stored: Sequence[bytes] = ()
    anew: bool = False
    """The cache has no other blocks than `stored`."""


FetchKv = Callable[[int], Awaitable[KvSpan]]
"""Fetches a prompt's keys and values, from a token on, from its prefill worker. Raises
OtherWeights."""


class CacheReports(Protocol):
    """The prefix cache of an engine, for routers: an optional attribute `cache_reports` of it."""

    def changes(self) -> AsyncGenerator[CacheChange, None]:
        """Yield the content, then each change, until closed."""


class Engine(Protocol):
    """Contract of all roles. An engine may have `cache_reports`, see `CacheReports`."""

    limits: ModelLimits
    capabilities: Capabilities

    @property
    def cache_tokens(self) -> int:
        """Capacity of the prefix cache; the router's prefix index has the same."""

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        """Serve these weights from the next step on, also for requests in flight.

        All or nothing: after UnfitWeights (also for other log-probs than those of `probe`) and
        BrokenWeights the engine is unchanged. Empties the prefix cache.
        """

    def status(self) -> EngineStatus:
        """Return version and load."""

    async def idle(self) -> None:
        """Wait until no request runs and no prompt is held."""

    async def close(self) -> None:
        """Stop the engine."""


class PrefillEngine(Engine, Protocol):
    """Contract of the prefill role."""

    @property
    def stored_tokens(self) -> int:
        """Capacity of the KV store that it shares with others; 0: none."""

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        """Wait for memory, read the prompt, sample its first token, hold the prompt for `hold_s`.

        Raises ResourceExhausted for a prompt above the whole memory, Unavailable without weights,
        and before the read InvalidArgument for a grammar that does not compile.
        """

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        """Return keys and values of a held prompt. Raises NotFound after its release."""

    def release(self, request_id: str) -> None:
        """Drop a held prompt; an unknown id changes nothing."""


class EarlyPrefillEngine(PrefillEngine, Protocol):
    """A prefill engine that declares EARLY_HAND_OFF."""

    def early_kv(self, request_id: str, *, from_token: int) -> AsyncGenerator[KvSpan | None, None]:
        """Yield keys and values of a prompt while it is computed: blocks of consecutive tokens, and
        None after some seconds without one. The last block ends with the prompt and has `first`.

        All blocks are of one version. Raises NotFound when the prefill ends without a result, or
        does not begin within some seconds.
        """


class DecodeEngine(Engine, Protocol):
    """Contract of the decode role."""

    capacity: int
    """Most requests that sample at the same time; others wait."""

    def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        """Sample after `first`, the token of prefill; the last piece has a finish reason.

        Closing the iterator aborts the request before the next step. Raises ResourceExhausted when
        the request is evicted because the memory is full, RefusedHandOff for keys and values that
        do not fit: prefill it again.
        """


class EarlyDecodeEngine(DecodeEngine, Protocol):
    """A decode engine that declares EARLY_HAND_OFF."""

    @property
    def kv_fingerprint(self) -> bytes:
        """`KvSpan.fingerprint` of its model."""

    def decode(
        self, prompt: Prompt, first: Tokens | None, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        """As `DecodeEngine`; without `first`, which `KvSpan.first` has then, of a prompt that is
        still computed."""


class BothEngine(PrefillEngine, DecodeEngine, Protocol):
    """Contract of the role both: reads prompts and samples, with one prefix cache.

    For a prompt that this engine has read, `decode` gets its `local_kv`, or its `fetch_kv` if it
    has no `local_kv`; for another prompt it gets the `fetch_kv` of a prefill worker.
    """


class AggregatedEngine(Protocol):
    """Contract of an engine that reads and samples in one call; `Aggregated` makes a `BothEngine`
    of it. This is the least that an engine has."""

    limits: ModelLimits
    capabilities: Capabilities
    capacity: int
    """Most requests that sample at the same time; others wait."""
    version: int
    """Version of the weights; 0 before any are loaded."""

    @property
    def cache_tokens(self) -> int:
        """See `Engine`."""

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        """See `Engine`."""

    def generate(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        """Sample an answer; pieces have one token or more, the last one a finish reason.

        Closing the iterator aborts the request before the next step. Different tasks may advance
        it. Requested experts come with the last piece. Raises Unavailable without weights,
        InvalidArgument for a grammar that does not compile.
        """

    async def close(self) -> None:
        """Stop the engine."""
