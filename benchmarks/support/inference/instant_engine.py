"""An engine that answers at once: what a worker costs beside its engine, and a router.

Owns a prefix cache without keys and values, whose changes it reports as the embedded engine does.
It ignores the weights. `install_engine` lets a worker find it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from forge.core.named_tensor import NamedTensor
from forge.core.placement.prefix_cache import PrefixCache
from forge.core.token_columns import int32_bytes
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import (
    EngineStatus,
    FetchKv,
    Finish,
    KvSpan,
    Piece,
    Prefilled,
    Probe,
    Prompt,
    Tokens,
)
from services.inference.engines.cache_reports.cache_log import CacheLog
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.model_limits import read_limits
from services.inference.engines.provider import EngineOptions

NAME = "instant"
_TOKEN = 7
_CACHE_TOKENS = 1 << 20


class InstantEngine:
    """A `BothEngine`."""

    capabilities = Capabilities(
        engine=NAME, roles=frozenset({"both"}), update="in_flight", draws="positional"
    )
    cache_tokens = _CACHE_TOKENS
    stored_tokens = 0

    def __init__(self, options: EngineOptions) -> None:
        self.limits = read_limits(options.model_path, context_tokens=options.context_tokens)
        self.capacity = options.max_running
        self.cache_reports = CacheLog()
        self._cache = PrefixCache(
            block_tokens=options.block_tokens,
            capacity_tokens=_CACHE_TOKENS,
            listener=self.cache_reports,
        )
        self._version = 0

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        self._version = version
        self._cache.clear()

    def status(self) -> EngineStatus:
        return EngineStatus(version=self._version, running=0)

    async def idle(self) -> None: ...

    async def close(self) -> None: ...

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        cached_tokens = self._cache.peek(prompt.ids)
        self._cache.insert(prompt.ids)
        return Prefilled(
            first=self._tokens(1), cached_tokens=cached_tokens, queue_s=0.0, prefill_s=0.01
        )

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        return KvSpan(
            from_token=from_token, tokens=0, version=self._version, dtype="", shape=(), data=b""
        )

    def release(self, request_id: str) -> None: ...

    async def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        await fetch_kv(0)
        tokens = self._tokens(prompt.sampling.max_tokens - 1)
        self._cache.insert(prompt.ids + int32_bytes(first.ids + tokens.ids))
        yield Piece(tokens=tokens, finish=Finish.LENGTH, decode_s=0.01)

    def _tokens(self, count: int) -> Tokens:
        return Tokens(
            ids=(_TOKEN,) * count, logprobs=(-1.0,) * count, versions=(self._version,) * count
        )


async def start_both(actors: ActorSystem, options: EngineOptions) -> InstantEngine:
    return InstantEngine(options)


def install_engine(folder: Path) -> str:
    """Write a package with this engine; return the path that has it. It is a copy, which a worker
    of another checkout finds, too."""
    info = folder / "engines-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[forge.engines]\n{NAME} = instant_engine\n")
    (folder / "instant_engine.py").write_text(Path(__file__).read_text())
    return str(folder)
