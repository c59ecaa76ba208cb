"""The roles prefill and decode of the engine vLLM. Not here: the role both; see `Aggregated`.

Decode begins with the token that prefill has sampled: vLLM samples it again, without a choice. So
grammar, penalties and draws are those of an answer that one engine samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Self

import vllm

from forge.core.errors import NotFound
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.aggregated import Served, joined, part
from services.inference.engines.base import (
    FetchKv,
    KvSpan,
    Piece,
    Prefilled,
    Prompt,
    Tokens,
)
from services.inference.engines.capabilities import Role
from services.inference.engines.metrics import REFUSED_HAND_OFFS
from services.inference.engines.provider import EngineOptions
from services.inference.engines.refusals import UsedIds
from services.inference.engines.vllm.arguments import settings_of
from services.inference.engines.vllm.engine import VllmEngine
from services.inference.engines.vllm.hand_off import (
    NOTHING,
    CopyHandOffs,
    HandOffs,
    Loading,
    NixlHandOffs,
    Saving,
)
from services.inference.engines.vllm.leg import Leg
from services.inference.engines.vllm.models import architecture_of


class _Role(Served):
    """Common part of both roles."""

    def __init__(self, engine: VllmEngine, hand_offs: HandOffs) -> None:
        super().__init__(engine)
        self.engine = engine
        self._hand_offs = hand_offs

    @classmethod
    async def start(cls, actors: ActorSystem, options: EngineOptions, role: Role) -> Self:
        """Start vLLM's process, without weights. Raises ConfigError."""
        engine = await VllmEngine.start(actors, options, role)
        return cls(engine, await _hand_offs(engine, options))


async def _hand_offs(engine: VllmEngine, options: EngineOptions) -> HandOffs:
    model = architecture_of(options.model_path)
    if settings_of(options).hand_off == "nixl":
        return NixlHandOffs(model=model, vllm_version=vllm.__version__)
    return CopyHandOffs(
        await engine.kv_layout(),
        model=model,
        block_tokens=engine.block_tokens,
        capacity_bytes=options.kv_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A prompt until decode has it."""

    saving: Saving
    span: KvSpan
    expiry: asyncio.TimerHandle


class VllmPrefill(_Role):
    """A `PrefillEngine`."""

    stored_tokens = 0

    def __init__(self, engine: VllmEngine, hand_offs: HandOffs) -> None:
        super().__init__(engine, hand_offs)
        self._held: dict[str, _Held] = {}
        self._reading_ids = UsedIds()

    async def close(self) -> None:
        """Drop all held prompts and stop vLLM."""
        for request_id in list(self._held):
            self.release(request_id)
        await self.engine.close()

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        """See `PrefillEngine`. Raises InvalidArgument for the id of another prompt."""
        with self._reading_ids.using(prompt.request_id, self._held):
            return await self._prefilled(prompt, hold_s=hold_s)

    async def _prefilled(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        began_s = time.monotonic()
        self.count(1)
        try:
            saving = await self._hand_offs.save(prompt)
            queue_s = time.monotonic() - began_s
            try:
                first, data = await self._read(prompt, saving)
                self._hold(prompt, saving, first, data, hold_s)
            except BaseException:
                saving.close()
                raise
        finally:
            self.count(-1)
        return Prefilled(
            first=part(first.tokens, 0, 1),
            cached_tokens=first.cached_tokens,
            queue_s=queue_s,
            prefill_s=time.monotonic() - began_s - queue_s,
        )

    async def _read(self, prompt: Prompt, saving: Saving) -> tuple[Piece, bytes | memoryview]:
        """Return the first token, and the hand-off: empty if the weights have changed."""
        asked = prompt.sampling
        least = min(1, asked.min_tokens)
        single = replace(prompt, sampling=replace(asked, max_tokens=1, min_tokens=least))
        leg = Leg(transfer=saving.params)
        async with aclosing(self.engine.generate(single, leg)) as pieces:
            (first,) = [piece async for piece in pieces]
        if not self.engine.is_of_one_load(leg):
            # Decode would cache keys and values of older weights for other requests.
            REFUSED_HAND_OFFS.labels("version").inc()
            return first, NOTHING
        return first, saving.data(leg.returned)

    def _hold(
        self,
        prompt: Prompt,
        saving: Saving,
        first: Piece,
        data: bytes | memoryview,
        hold_s: float,
    ) -> None:
        span = KvSpan(
            from_token=0,
            tokens=prompt.tokens,
            version=first.tokens.versions[0],
            dtype="uint8",
            shape=(len(data),),
            data=data,
            fingerprint=self._hand_offs.fingerprint,
        )
        expiry = asyncio.get_running_loop().call_later(hold_s, self.release, prompt.request_id)
        self._held[prompt.request_id] = _Held(saving=saving, span=span, expiry=expiry)
        self.count(1)

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        """Return the whole hand-off, also if decode has cached a part."""
        held = self._held.get(request_id)
        if held is None:
            raise NotFound(f"no prompt is held for request {request_id!r}")
        return held.span

    def release(self, request_id: str) -> None:
        """See `PrefillEngine`."""
        held = self._held.pop(request_id, None)
        if held is not None:
            held.expiry.cancel()
            held.saving.close()
            self.count(-1)


class VllmDecode(_Role):
    """A `DecodeEngine`."""

    async def close(self) -> None:
        """Stop vLLM."""
        await self.engine.close()

    async def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        """See `DecodeEngine`. A hand-off of another kind or of other weights is not used."""
        self.count(1)
        loading: Loading | None = None
        try:
            span = await fetch_kv(0)
            loading = await self._loading(span, prompt)
            async for piece in self._sample(prompt, first, span, loading, stream=stream):
                yield piece
        finally:
            if loading is not None:
                loading.close()
            self.count(-1)

    async def _loading(self, span: KvSpan, prompt: Prompt) -> Loading | None:
        if span.fingerprint != self._hand_offs.fingerprint:
            REFUSED_HAND_OFFS.labels("model").inc()
            return None
        return await self._hand_offs.load(span, prompt)

    async def _sample(
        self,
        prompt: Prompt,
        first: Tokens,
        span: KvSpan,
        loading: Loading | None,
        *,
        stream: bool,
    ) -> AsyncGenerator[Piece, None]:
        began_s = time.monotonic()
        leg = Leg(first=first.ids)
        if loading is not None:
            leg.version, leg.transfer = span.version, loading.params
        repeated, unsent = len(first.ids), Tokens()
        async with aclosing(self.engine.generate(prompt, leg)) as pieces:
            async for piece in pieces:
                # vLLM has sampled a token: the keys and values have arrived.
                unsent = joined(unsent, part(piece.tokens, repeated, None))
                repeated -= min(repeated, len(piece.tokens.ids))
                if piece.finish is not None:
                    took_s = time.monotonic() - began_s
                    yield Piece(tokens=unsent, finish=piece.finish, decode_s=took_s)
                elif stream and unsent.ids:
                    yield Piece(tokens=unsent)
                    unsent = Tokens()
