"""The role decode of the embedded engine on the event loop; its actor computes on a thread.

Owns which request fetches which keys and values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, ClassVar

from forge.core.errors import ForgeError
from forge.runtime.actors.actor import ThreadActor
from forge.runtime.actors.actor_system import ActorRef
from services.inference.engines.base import (
    FetchKv,
    KvSpan,
    OtherWeights,
    Piece,
    Prompt,
    RefusedHandOff,
    Tokens,
)
from services.inference.engines.embedded.kv.prefix_cache import prefix
from services.inference.engines.embedded.messages import Abort, Join, Reserve
from services.inference.engines.embedded.roles.role_engine import RoleEngine
from services.inference.engines.embedded.roles.wiring import (
    EngineParts,
    decode_actor,
    running_limit,
)
from services.inference.engines.provider import EngineOptions
from services.inference.engines.refusals import UsedIds


class EmbeddedDecode(RoleEngine):
    """Samples; fetches the keys and values that its prefix cache lacks."""

    role = "decode"
    held_share: ClassVar[float] = 0.0
    """Share of the memory for held prompts, as in `EmbeddedPrefill`."""
    resumes = False

    def __init__(self, parts: EngineParts, actor: ActorRef) -> None:
        super().__init__(parts, actor)
        self.capacity = running_limit(
            parts, kv_bytes=self.running_bytes(parts.options), resumes=self.resumes
        )
        self._fetching: dict[bytes, asyncio.Event] = {}
        self._decoding_ids = UsedIds()

    @classmethod
    def make_actor(cls, parts: EngineParts) -> ThreadActor:
        """Return the actor that samples."""
        return decode_actor(
            parts,
            parts.prefix_cache(resumes=cls.resumes),
            kv_bytes=cls.running_bytes(parts.options),
            resumes=cls.resumes,
        )

    @classmethod
    def running_bytes(cls, options: EngineOptions) -> int:
        """Memory of running sequences."""
        return options.kv_bytes - int(options.kv_bytes * cls.held_share)

    async def decode(
        self, prompt: Prompt, first: Tokens | None, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        """See `DecodeEngine`. Raises InvalidArgument for the id of another request."""
        with self._decoding_ids.using(prompt.request_id):
            async with aclosing(self._decode(prompt, first, fetch_kv, stream=stream)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _decode(
        self, prompt: Prompt, first: Tokens | None, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        asked_s = time.monotonic()
        pieces: asyncio.Queue[Piece | ForgeError] = asyncio.Queue()
        self._work.add(1)
        finished = False
        try:
            # Without `first` this compiles the grammar while the prompt is computed.
            matcher = await self._grammars.matcher(prompt, first.ids if first else ())
            async with self._missing(prompt, early=first is None) as missing_from:
                span = await self._fetched(prompt, fetch_kv, missing_from)
                if first is None:
                    first = _first_of(span)
                    matcher = await self._grammars.matcher(prompt, first.ids)
                join = Join(
                    prompt=prompt,
                    first=first,
                    span=span,
                    stream=stream,
                    asked_s=asked_s,
                    deliver=pieces.put_nowait,
                    matcher=matcher,
                )
                await self._ask(join)
            while not finished:
                piece = await pieces.get()
                if isinstance(piece, ForgeError):
                    raise piece
                finished = piece.finish is not None
                yield piece
        finally:
            self._work.add(-1)
            if not finished and self._actor.alive:
                self._actor.tell(Abort(request_id=prompt.request_id))

    async def _fetched(self, prompt: Prompt, fetch_kv: FetchKv, missing_from: int) -> KvSpan:
        """Fetch the missing part; all of the prompt, if other weights than those of the cached part
        computed it."""
        try:
            span = await fetch_kv(missing_from)
        except OtherWeights:
            missing_from = await self._ask(Reserve(prompt=prompt, cached=False))
            span = await fetch_kv(missing_from)
        self._policy.kv_shape.check(span, from_token=missing_from, to_token=prompt.tokens)
        return span

    @asynccontextmanager
    async def _missing(self, prompt: Prompt, *, early: bool) -> AsyncIterator[int]:
        """Yield the first token whose keys and values are absent; those before it are pinned.

        If several requests lack the same next block, one fetches it and the others wait until it is
        cached: a group of rollouts transfers its common prompt once. An early fetch lasts until the
        whole prompt is computed: only early fetches of the same prompt wait for it.
        """
        cached: int = await self._ask(Reserve(prompt=prompt))
        block = self._next_block(prompt, cached)
        other = self._fetching.get(block)
        if other is None and early:
            other = self._fetching.get(prompt.ids)
        if other is not None:
            await other.wait()
            # Only once: the other's blocks may not have been cached.
            cached = await self._ask(Reserve(prompt=prompt))
            block = self._next_block(prompt, cached)
        key = prompt.ids if early and block else block
        if not key or key in self._fetching:
            yield cached
            return
        self._fetching[key] = fetched = asyncio.Event()
        try:
            yield cached
        finally:
            del self._fetching[key]
            fetched.set()

    def _next_block(self, prompt: Prompt, cached_tokens: int) -> bytes:
        """Return the prefix up to the first uncached block; empty without a whole block."""
        end = cached_tokens + self._options.block_tokens
        return prefix(prompt.ids, end) if end <= prompt.tokens else b""

    async def _ask(self, message: Reserve | Join) -> Any:
        return await self._actor.ask(message, timeout_s=self._options.request_timeout_s)


def _first_of(span: KvSpan) -> Tokens:
    if span.first is None or len(span.first.ids) != 1:
        raise RefusedHandOff("the early hand-off came without the first token of its answer")
    return span.first
