"""The role prefill of the embedded engine on the event loop; its actor computes on a thread.

Owns the prompts held for decode workers. Only slices of prompts, which are immutable, are computed
here; the actor does all other tensor work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from forge.core.errors import DeadlineExceeded, NotFound, ResourceExhausted
from forge.core.placement.chain_hashes import PromptChains
from forge.runtime.actors.actor import ThreadActor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.futures import settle
from services.inference.engines import tensor_bytes
from services.inference.engines.base import KvSpan, Prefilled, Prompt
from services.inference.engines.embedded.memory_shortage import attempt
from services.inference.engines.embedded.messages import Abort, HeldPrompt, PartRead, Read
from services.inference.engines.embedded.recurrent.read_states import MOST_STOPS
from services.inference.engines.embedded.roles.early_reads import EarlyRead, EarlyReads
from services.inference.engines.embedded.roles.held_prompts import HeldPrompts
from services.inference.engines.embedded.roles.role_engine import RoleEngine
from services.inference.engines.embedded.roles.stored_reads import StoredReads
from services.inference.engines.embedded.roles.wiring import EngineParts, prefill_actor
from services.inference.engines.embedded.stored_kv import StoredPrefix
from services.inference.engines.grammar_masks import Matcher
from services.inference.engines.refusals import UsedIds

_INLINE_BYTES = 1 << 18
"""Keys and values up to this size are copied on the event loop; a thread takes longer to start."""
_BLOCK_BYTES = 1 << 24
"""Most keys and values of one block of an early hand-off."""
_LEAST_BLOCK_TOKENS = 64
"""Fewer computed tokens wait for the next pass."""
_RETRY_AFTER_S = 0.5


class EmbeddedPrefill(RoleEngine):
    """Reads prompts; holds their keys and values until a decode worker has fetched them."""

    held_share: ClassVar[float] = 1.0
    """Share of the memory for keys and values that held prompts may take."""
    resumes = True
    role = "prefill"

    def __init__(self, parts: EngineParts, actor: ActorRef) -> None:
        super().__init__(parts, actor)
        self._held = HeldPrompts(
            capacity_bytes=int(parts.options.kv_bytes * self.held_share),
            token_bytes=parts.policy.kv_shape.token_bytes,
            prompt_bytes=(2 + MOST_STOPS) * parts.policy.kv_shape.state_bytes,
            on_release=partial(self._work.add, -1),
        )
        self._early = EarlyReads()
        self._reading_ids = UsedIds()
        self._stored_reads = _stored_reads(parts)

    @classmethod
    def make_actor(cls, parts: EngineParts) -> ThreadActor:
        """Return the actor that reads prompts."""
        return prefill_actor(parts, parts.prefix_cache(resumes=cls.resumes))

    @property
    def stored_tokens(self) -> int:
        """See `PrefillEngine`."""
        store = self._options.kv_store
        return 0 if store is None else store.max_bytes // self._policy.kv_shape.token_bytes

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        """See `PrefillEngine`. Raises InvalidArgument for the id of another read or held prompt."""
        with self._reading_ids.using(prompt.request_id, self._held):
            return await self._prefill(prompt, hold_s=hold_s)

    async def _prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        now_s = time.monotonic()
        self._work.add(1)
        try:
            with self._early.during(prompt.request_id) as early:
                matcher = await self._grammars.matcher(prompt)
                async with self._held.reading(prompt), self._stored(prompt) as stored:
                    held_prompt = await self._read(
                        prompt, matcher, early, stored=stored, asked_s=now_s
                    )
                    self._held.hold(prompt, held_prompt, hold_s=hold_s)
                early.finish(held_prompt)
        except BaseException:
            self._work.add(-1)
            raise
        return held_prompt.prefilled

    def _stored(self, prompt: Prompt) -> AbstractAsyncContextManager[StoredPrefix | None]:
        return nullcontext() if self._stored_reads is None else self._stored_reads.during(prompt)

    async def _read(
        self,
        prompt: Prompt,
        matcher: Matcher | None,
        early: EarlyRead,
        *,
        stored: StoredPrefix | None,
        asked_s: float,
    ) -> HeldPrompt:
        answer: asyncio.Future[HeldPrompt] = asyncio.get_running_loop().create_future()
        timeout_s = self._options.request_timeout_s
        read = Read(
            prompt=prompt,
            asked_s=asked_s,
            deliver=partial(settle, answer),
            progress=early.advance,
            matcher=matcher,
            stored=stored,
        )
        try:
            self._actor.tell(read)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"the prompt was not computed within {timeout_s:g} s") from None
        finally:
            if self._actor.alive and (not answer.done() or answer.cancelled()):
                self._actor.tell(Abort(request_id=prompt.request_id))

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        """See `PrefillEngine`."""
        held = self._held.get(request_id)
        if held is None:
            raise NotFound(f"no keys and values are held for request {request_id}")
        return await self._span(held, from_token, held.kv.shape[3], asked_from=from_token)

    async def local_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        """As `fetch_kv`, for the role decode of this engine: copies nothing."""
        held = self._held.get(request_id)
        if held is None:
            raise NotFound(f"no keys and values are held for request {request_id}")
        return replace(
            self._described(held, from_token, held.kv.shape[3]),
            kept=held,
            first=held.prefilled.first,
            routes=tensor_bytes.to_bytes(held.routes[from_token:]),
        )

    async def early_kv(
        self, request_id: str, *, from_token: int
    ) -> AsyncGenerator[KvSpan | None, None]:
        """See `EarlyPrefillEngine`."""
        sent, held = from_token, self._held.get(request_id)
        read = None if held else await self._early.find(request_id)
        while held is None and read is not None:
            found = await read.after(sent + _LEAST_BLOCK_TOKENS)
            if isinstance(found, HeldPrompt):
                held = found
            elif found is None:
                yield None
            else:
                for end in self._ends(sent, found.tokens):
                    yield await self._span(found, sent, end)
                    sent = end
        assert held is not None
        *ends, last = self._ends(sent, held.kv.shape[3])
        for end in ends:
            yield await self._span(held, sent, end)
            sent = end
        yield await self._span(held, sent, last, asked_from=from_token)

    def _ends(self, start: int, end: int) -> list[int]:
        """Return the ends of the blocks between two tokens, at least one."""
        most = max(1, _BLOCK_BYTES // self._policy.kv_shape.token_bytes)
        return [*range(start + most, end, most), end]

    async def _span(
        self,
        read: PartRead | HeldPrompt,
        start: int,
        end: int,
        *,
        asked_from: int | None = None,
    ) -> KvSpan:
        """Copy the keys and values of some tokens; `asked_from`: the first token of the hand-off
        that they end, with what follows the prompt."""
        data = await _copied(read.kv[:, :, :, start:end])
        span = replace(self._described(read, start, end), data=data)
        if asked_from is None or not isinstance(read, HeldPrompt):
            return span
        state = read.state
        return replace(
            span,
            first=read.prefilled.first,
            last_state=b"" if state is None else tensor_bytes.to_bytes(state),
            recurrent=await _copied(read.recurrent),
            routes=await _copied(read.routes[asked_from:]),
        )

    def _described(self, read: PartRead | HeldPrompt, start: int, end: int) -> KvSpan:
        """Some tokens of a prompt, without their data."""
        kv = read.kv[:, :, :, start:end]
        return KvSpan(
            from_token=start,
            tokens=end - start,
            version=read.version,
            dtype=tensor_bytes.NAMES[kv.dtype],
            shape=tuple(kv.shape),
            data=b"",
            fingerprint=self._policy.kv_shape.fingerprint,
        )

    def release(self, request_id: str) -> None:
        """See `PrefillEngine`."""
        self._held.release(request_id)

    async def close(self) -> None:
        """Release all held prompts and stop."""
        self._held.clear()
        await super().close()


def _stored_reads(parts: EngineParts) -> StoredReads | None:
    """Reads of the store from the first block on that the prefix cache lacks."""
    stored, block_tokens = parts.stored_kv(), parts.options.block_tokens
    if stored is None:
        return None

    def cached_tokens(ids: bytes) -> int:
        return parts.cache_log.present(PromptChains(ids).of(block_tokens)) * block_tokens

    return StoredReads(stored, parts.policy.kv_shape, cached_tokens=cached_tokens)


async def _copied(values: torch.Tensor | None) -> bytes:
    """The bytes of a tensor; of none, none. Raises ResourceExhausted without memory for them."""
    if values is None:
        return b""
    copy = partial(attempt, partial(tensor_bytes.to_bytes, values), values.device)
    copied = copy() if values.nbytes <= _INLINE_BYTES else await asyncio.to_thread(copy)
    if copied.result is None:
        raise ResourceExhausted(
            f"there is no memory to send {values.nbytes} bytes of a prompt: {copied.shortage}",
            retry_after_s=_RETRY_AFTER_S,
        )
    return copied.result
