"""An engine of another package: its answer counts up from the last token of the prompt."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Mapping

from forge.core.named_tensor import NamedTensor
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import (
    EngineStatus,
    FetchKv,
    Finish,
    KvSpan,
    ModelLimits,
    Piece,
    Prefilled,
    Probe,
    Prompt,
    Tokens,
)
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.provider import EngineOptions


class CountingEngine:
    """Both roles; keys and values of a prompt are zeros."""

    def __init__(self, options: EngineOptions) -> None:
        self.limits = ModelLimits(context_tokens=options.context_tokens, vocabulary=1000)
        self.capabilities = Capabilities(
            engine="counting",
            roles=frozenset({"prefill", "decode"}),
            hand_offs=frozenset({"counting"}),
            update="in_flight",
            draws="positional",
        )
        self.cache_tokens = 0
        self.capacity = options.max_running
        self._version = 0
        self._prompts: dict[str, Prompt] = {}

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        self._version = version

    def status(self) -> EngineStatus:
        return EngineStatus(version=self._version, running=len(self._prompts))

    async def idle(self) -> None: ...

    async def close(self) -> None: ...

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        self._prompts[prompt.request_id] = prompt
        last = array("i", prompt.ids)[-1]
        return Prefilled(first=self._tokens(last + 1), cached_tokens=0, queue_s=0.0, prefill_s=0.01)

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        tokens = self._prompts[request_id].tokens - from_token
        return KvSpan(
            from_token=from_token,
            tokens=tokens,
            version=self._version,
            dtype="float32",
            shape=(1, 2, 1, tokens, 1),
            data=bytes(8 * tokens),
        )

    def release(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)

    async def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        span = await fetch_kv(0)
        assert span.tokens == prompt.tokens
        ids = range(first.ids[0] + 1, first.ids[0] + prompt.sampling.max_tokens)
        yield Piece(tokens=self._tokens(*ids), finish=Finish.LENGTH, decode_s=0.01)

    def _tokens(self, *ids: int) -> Tokens:
        return Tokens(ids=ids, logprobs=(0.0,) * len(ids), versions=(self._version,) * len(ids))


async def start_prefill(actors: ActorSystem, options: EngineOptions) -> CountingEngine:
    return CountingEngine(options)


async def start_decode(actors: ActorSystem, options: EngineOptions) -> CountingEngine:
    return CountingEngine(options)
