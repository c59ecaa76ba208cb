"""The embedded engine on the event loop; its two actors compute on threads.

Owns the prompts held for decode workers, and which request fetches which keys and values. Only
slices of held prompts, which are immutable, are computed here; the actors do all other tensor work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from forge.core.errors import DeadlineExceeded, ForgeError, NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.actors.supervision import Restart
from forge.runtime.telemetry import log
from services.inference.engines import tensor_bytes
from services.inference.engines.base import (
    EngineStatus,
    FetchKv,
    KvSpan,
    ModelLimits,
    Piece,
    Prefilled,
    Probe,
    Prompt,
    Tokens,
)
from services.inference.engines.cache_log import CacheLog
from services.inference.engines.embedded import family_check
from services.inference.engines.embedded.both import BothActor
from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.held_prompts import HeldPrompts
from services.inference.engines.embedded.kv.prefix_cache import prefix
from services.inference.engines.embedded.messages import Abort, Join, Reserve, Swap
from services.inference.engines.embedded.model import Policy
from services.inference.engines.embedded.prefill import HeldPrompt, PrefillActor, Read
from services.inference.engines.embedded.stored_kv import architecture
from services.inference.engines.embedded.wiring import (
    CAPABILITIES,
    build_policy,
    decode_actor,
    kv_store,
    prefill_actor,
    prefix_cache,
)
from services.inference.engines.grammar_masks import Grammars, Matcher
from services.inference.engines.kv_store.store import KvStore
from services.inference.engines.provider import EngineOptions

# A crash leaves the model in an unknown state: the process ends, its supervisor starts a new one.
_NEVER_RESTART = Restart(max_restarts=0)
_INLINE_BYTES = 1 << 18
"""Keys and values up to this size are copied on the event loop; a thread takes longer to start."""


class _Work:
    """Counts unfinished requests."""

    def __init__(self) -> None:
        self.count = 0
        self.none = asyncio.Event()
        self.none.set()

    def add(self, change: int) -> None:
        self.count += change
        if self.count:
            self.none.clear()
        else:
            self.none.set()


class _Embedded:
    """Shared by both roles: limits, weights and the count of requests."""

    def __init__(
        self,
        policy: Policy,
        actor: ActorRef,
        options: EngineOptions,
        store: KvStore | None,
        cache_log: CacheLog,
    ) -> None:
        self.limits: ModelLimits = policy.limits
        self.capabilities = replace(CAPABILITIES, routed_experts=policy.kv_shape.routes is not None)
        self._policy = policy
        self._actor = actor
        self._options = options
        self._store = store
        self.cache_reports = cache_log
        self._grammars = Grammars(options.model_path, vocabulary=policy.limits.vocabulary)
        self._work = _Work()
        context_bytes = policy.limits.context_tokens * policy.kv_shape.token_bytes
        if context_bytes > options.kv_bytes:
            log.warning(
                "context_exceeds_kv_mib",
                context_tokens=policy.limits.context_tokens,
                needed_mib=-(-context_bytes >> 20),
                kv_mib=options.kv_bytes >> 20,
            )

    @property
    def cache_tokens(self) -> int:
        """Capacity of the prefix cache."""
        block_bytes = self._options.block_tokens * self._policy.kv_shape.token_bytes
        return self._options.cache_bytes // block_bytes * self._options.block_tokens

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        """See `Engine`."""
        swap = await asyncio.to_thread(self._stage, tensors, version, probe)
        await self._actor.ask(swap, timeout_s=self._options.request_timeout_s)

    def _stage(self, tensors: Mapping[str, NamedTensor], version: int, probe: Probe | None) -> Swap:
        model = None
        if self._store is not None:
            model = architecture(self._options.model_path, self._policy.kv_shape)
        staged = self._policy.stage(tensors, version=version, architecture=model)
        return Swap(weights=staged, probe=probe, kv_identity=staged.identity)

    async def idle(self) -> None:
        """See `Engine`."""
        await self._work.none.wait()

    async def close(self) -> None:
        """See `Engine`."""
        self._grammars.close()
        await self._actor.stop()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)


class EmbeddedPrefill(_Embedded):
    """Reads prompts; holds their keys and values until a decode worker has fetched them."""

    held_share: ClassVar[float] = 1.0
    """Share of the memory for keys and values that held prompts may take."""

    def __init__(
        self,
        policy: Policy,
        actor: ActorRef,
        options: EngineOptions,
        store: KvStore | None,
        cache_log: CacheLog,
    ) -> None:
        super().__init__(policy, actor, options, store, cache_log)
        self._held = HeldPrompts(
            capacity_bytes=int(options.kv_bytes * self.held_share),
            token_bytes=policy.kv_shape.token_bytes,
            on_release=partial(self._work.add, -1),
        )

    @classmethod
    async def start(cls, actors: ActorSystem, options: EngineOptions) -> EmbeddedPrefill:
        """Build the model and start the actor."""
        policy = await asyncio.to_thread(build_policy, options)
        store, log = kv_store(options, policy), CacheLog()

        def actor() -> PrefillActor:
            return prefill_actor(options, policy, prefix_cache(options, policy, log), store)

        ref = await actors.spawn(actor, name="prefill", restart=_NEVER_RESTART)
        return cls(policy, ref, options, store, log)

    @property
    def stored_tokens(self) -> int:
        """See `PrefillEngine`."""
        store = self._options.kv_store
        return 0 if store is None else store.max_bytes // self._policy.kv_shape.token_bytes

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        """See `PrefillEngine`."""
        now_s = time.monotonic()
        self._work.add(1)
        try:
            matcher = await self._grammars.matcher(prompt)
            async with self._held.reading(prompt):
                held_prompt = await self._read(prompt, matcher, asked_s=now_s)
                self._held.hold(prompt, held_prompt, hold_s=hold_s)
        except BaseException:
            self._work.add(-1)
            raise
        return held_prompt.prefilled

    async def _read(self, prompt: Prompt, matcher: Matcher | None, *, asked_s: float) -> HeldPrompt:
        answer: asyncio.Future[HeldPrompt] = asyncio.get_running_loop().create_future()

        def deliver(read: HeldPrompt | ForgeError) -> None:
            if answer.done():
                return
            if isinstance(read, ForgeError):
                answer.set_exception(read)
            else:
                answer.set_result(read)

        timeout_s = self._options.request_timeout_s
        await self._actor.ask(
            Read(prompt=prompt, asked_s=asked_s, deliver=deliver, matcher=matcher),
            timeout_s=timeout_s,
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"the prompt was not read within {timeout_s:g} s") from None
        finally:
            if not answer.done() or answer.cancelled():
                self._actor.tell(Abort(request_id=prompt.request_id))

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        """See `PrefillEngine`."""
        held = self._held.get(request_id)
        if held is None:
            raise NotFound(f"no keys and values are held for request {request_id}")
        kv = held.kv[:, :, :, from_token:]
        if kv.nbytes <= _INLINE_BYTES:
            data = tensor_bytes.to_bytes(kv)
        else:
            data = await asyncio.to_thread(tensor_bytes.to_bytes, kv)
        return KvSpan(
            from_token=from_token,
            tokens=kv.shape[3],
            version=held.version,
            dtype=tensor_bytes.NAMES[kv.dtype],
            shape=tuple(kv.shape),
            last_state=b"" if held.state is None else tensor_bytes.to_bytes(held.state),
            data=data,
            fingerprint=self._policy.kv_shape.fingerprint,
            routes=held.routes[from_token:].numpy().tobytes(),
        )

    def release(self, request_id: str) -> None:
        """See `PrefillEngine`."""
        self._held.release(request_id)

    async def close(self) -> None:
        """Release all held prompts and stop."""
        self._held.clear()
        await super().close()

    def status(self) -> EngineStatus:
        """Count held prompts as queued."""
        held = len(self._held)
        return EngineStatus(
            version=self._policy.version, running=self._work.count - held, queued=held
        )


class EmbeddedDecode(_Embedded):
    """Samples; fetches the keys and values that its prefix cache lacks."""

    def __init__(
        self,
        policy: Policy,
        actor: ActorRef,
        options: EngineOptions,
        store: KvStore | None,
        cache_log: CacheLog,
    ) -> None:
        super().__init__(policy, actor, options, store, cache_log)
        self.capacity = options.max_running
        self._fetching: dict[bytes, asyncio.Event] = {}

    @classmethod
    async def start(cls, actors: ActorSystem, options: EngineOptions) -> EmbeddedDecode:
        """Build the model and start the actor."""
        policy = await asyncio.to_thread(build_policy, options)
        store, log = kv_store(options, policy), CacheLog()

        def actor() -> DecodeActor:
            cache = prefix_cache(options, policy, log)
            return decode_actor(options, policy, cache, store, kv_bytes=options.kv_bytes)

        ref = await actors.spawn(actor, name="decode", restart=_NEVER_RESTART)
        return cls(policy, ref, options, store, log)

    def status(self) -> EngineStatus:
        """Count requests beyond `capacity` as queued."""
        running = min(self._work.count, self.capacity)
        return EngineStatus(
            version=self._policy.version, running=running, queued=self._work.count - running
        )

    async def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        """See `DecodeEngine`."""
        asked_s = time.monotonic()
        pieces: asyncio.Queue[Piece | ForgeError] = asyncio.Queue()
        self._work.add(1)
        finished = False
        try:
            matcher = await self._grammars.matcher(prompt, first.ids)
            async with self._missing(prompt) as missing_from:
                span = await fetch_kv(missing_from)
                self._policy.kv_shape.check(span, from_token=missing_from, to_token=prompt.tokens)
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

    @asynccontextmanager
    async def _missing(self, prompt: Prompt) -> AsyncIterator[int]:
        """Yield the first token whose keys and values are absent; those before it are pinned.

        If several requests lack the same next block, one fetches it and the others wait until it is
        cached: a group of rollouts transfers its common prompt once.
        """
        cached: int = await self._ask(Reserve(prompt=prompt))
        if (other := self._fetching.get(self._next_block(prompt, cached))) is not None:
            await other.wait()
            # Only once: the other's blocks may not have been cached.
            cached = await self._ask(Reserve(prompt=prompt))
        block = self._next_block(prompt, cached)
        if not block or block in self._fetching:
            yield cached
            return
        self._fetching[block] = fetched = asyncio.Event()
        try:
            yield cached
        finally:
            del self._fetching[block]
            fetched.set()

    def _next_block(self, prompt: Prompt, cached_tokens: int) -> bytes:
        """Return the prefix up to the first uncached block; empty without a whole block."""
        end = cached_tokens + self._options.block_tokens
        return prefix(prompt.ids, end) if end <= prompt.tokens else b""

    async def _ask(self, message: Reserve | Join) -> Any:
        return await self._actor.ask(message, timeout_s=self._options.request_timeout_s)


class EmbeddedBoth(EmbeddedPrefill, EmbeddedDecode):
    """Reads prompts and samples, with one model and one prefix cache."""

    held_share = 1 / 4

    @classmethod
    async def start(cls, actors: ActorSystem, options: EngineOptions) -> EmbeddedBoth:
        """Build the model and start the actor."""
        policy = await asyncio.to_thread(build_policy, options)
        store, log = kv_store(options, policy), CacheLog()
        running_bytes = options.kv_bytes - int(options.kv_bytes * cls.held_share)

        def actor() -> BothActor:
            cache = prefix_cache(options, policy, log)
            return BothActor(
                prefill_actor(options, policy, cache, store),
                decode_actor(options, policy, cache, store, kv_bytes=running_bytes),
            )

        ref = await actors.spawn(actor, name="both", restart=_NEVER_RESTART)
        return cls(policy, ref, options, store, log)

    def status(self) -> EngineStatus:
        """Count held prompts and requests beyond `capacity` as queued."""
        running = min(self._work.count - len(self._held), self.capacity)
        return EngineStatus(
            version=self._policy.version, running=running, queued=self._work.count - running
        )


# Makes this module an `EngineProvider`; `check` and `start_both` are its optional parts.
start_prefill = EmbeddedPrefill.start
start_decode = EmbeddedDecode.start
start_both = EmbeddedBoth.start
check = family_check.check
