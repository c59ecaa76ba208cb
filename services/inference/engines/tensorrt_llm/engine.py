"""The engine in its roles, on the event loop; the library computes in processes of its own.

Owns the prompts held between prefill and decode. Not here: the library (`llm`), one answer
(`answer`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from forge.core.errors import DataLoss, NotFound, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.core.token_columns import int32_array
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.actors.supervision import Restart
from forge.runtime.concurrency.tasks import cancel_and_wait
from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.aggregated import part
from services.inference.engines.arriving import Arriving
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
from services.inference.engines.cache_reports.cache_log import CacheLog
from services.inference.engines.model_limits import read_limits
from services.inference.engines.provider import EngineOptions
from services.inference.engines.refusals import UsedIds, refused
from services.inference.engines.tensorrt_llm.answer import LlmAnswer
from services.inference.engines.tensorrt_llm.arguments import Role, engine_arguments, transfers
from services.inference.engines.tensorrt_llm.cache_events import CacheEvents
from services.inference.engines.tensorrt_llm.hand_off import (
    FINGERPRINT,
    HandOff,
    context_params,
    read_hand_off,
    write_hand_off,
)
from services.inference.engines.tensorrt_llm.library.library import Library
from services.inference.engines.tensorrt_llm.llm import EngineDied, Llm
from services.inference.engines.tensorrt_llm.metrics import CONTINUED
from services.inference.engines.tensorrt_llm.requests import (
    capabilities_of,
    check_temperature,
    read_tokens,
    sampling_params,
)
from services.inference.engines.tensorrt_llm.watch import watch_cache, watch_statistics
from services.inference.engines.tensorrt_llm.weights.checkpoint import read_checkpoint

# A dead engine of the library ends the worker; its supervisor starts a new one.
_NEVER_RESTART = Restart(max_restarts=0)
_ID_BITS = 63
_NOTHING = b"\0"
"""In place of a hand-off; a span has at least one byte."""


class _Owner(Actor):
    """Ends the worker when the library's engine has died, and the engine with the worker."""

    def __init__(self, llm: Llm) -> None:
        self._llm = llm

    async def receive(self, message: EngineDied) -> None:
        """Fail for good."""
        raise message

    async def stopped(self) -> None:
        """End the library's engine."""
        await self._llm.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A prompt between prefill and decode."""

    prompt_tokens: int
    version: int
    answer: LlmAnswer | None = None
    """Role both: runs on while it is held."""
    hand_off: bytes = b""
    expiry: asyncio.TimerHandle


class TensorRtLlm:
    """All roles; which methods serve depends on `role`."""

    def __init__(
        self, llm: Llm, options: EngineOptions, settings: TensorRtLlmSettings, role: Role
    ) -> None:
        self.limits: ModelLimits = read_limits(
            options.model_path, context_tokens=options.context_tokens
        )
        self.capabilities = capabilities_of(
            llm.library.features, transfers=transfers(role, settings)
        )
        self.capacity = options.max_running
        self.stored_tokens = 0
        self.cache_reports = CacheLog()
        self._settings = settings
        self._role = role
        self._llm = llm
        self._cache = CacheEvents(self.cache_reports, block_tokens=options.block_tokens)
        self._held: dict[str, _Held] = {}
        self._reading_ids = UsedIds()
        self._answers: set[LlmAnswer] = set()
        self._reads: set[asyncio.Task[Any]] = set()
        self._watches: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, actors: ActorSystem, options: EngineOptions, library: Library, role: Role
    ) -> TensorRtLlm:
        """Start the library's engine. Raises `ConfigError` for settings that it does not have, and
        for a model without weights."""
        settings = options.settings
        if not isinstance(settings, TensorRtLlmSettings):
            settings = TensorRtLlmSettings()
        limits = read_limits(options.model_path, context_tokens=options.context_tokens)
        arguments = engine_arguments(library, options, settings, role=role, limits=limits)
        checkpoint = await asyncio.to_thread(read_checkpoint, options.model_path, library.features)
        holds = role is Role.PREFILL
        llm = Llm(
            library,
            arguments,
            settings,
            checkpoint=checkpoint,
            limits=limits,
            holds_prompts=holds,
        )
        await llm.start()
        engine = cls(llm, options, settings, role)
        owner = await actors.spawn(lambda: _Owner(llm), name="tensorrt_llm", restart=_NEVER_RESTART)
        engine._watch(owner)
        return engine

    @property
    def cache_tokens(self) -> int:
        """Tokens that routers expect in the prefix cache."""
        return self._settings.cached_tokens

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        """See `Engine`."""
        await self._llm.update(tensors, version=version, probe=probe)
        self._cache.clear()

    async def load_arriving(
        self, arriving: Arriving, *, version: int, probe: Probe | None = None
    ) -> None:
        """See `ArrivingEngine`."""
        await self._llm.update_arriving(arriving, version=version, probe=probe)
        self._cache.clear()

    def status(self) -> EngineStatus:
        """See `Engine`."""
        held = sum(one.answer is None or one.answer.is_done for one in self._held.values())
        running = held + len(self._reads) + sum(not one.is_done for one in self._answers)
        return EngineStatus(version=self._llm.version, running=running)

    async def idle(self) -> None:
        """See `Engine`."""
        while self._held or self._reads or any(not one.is_done for one in self._answers):
            waits = [asyncio.create_task(one.ended()) for one in self._answers]
            waits += [asyncio.create_task(_settled(self._reads))]
            await asyncio.wait(waits)
            if self._held:
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """See `Engine`."""
        await cancel_and_wait(*self._watches)
        await self._llm.close()

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        """See `PrefillEngine`. Raises InvalidArgument for the id of another prompt."""
        prompt = self._fitting(prompt)
        began_s = time.monotonic()
        cached = self._cache.cached_tokens(prompt.ids)
        if self._role is Role.BOTH:
            first = await self._begin(prompt, hold_s)
        else:
            # A task: a prefill cannot be aborted safely, so it outlives its caller.
            read = asyncio.create_task(self._read_once(prompt, hold_s))
            self._reads.add(read)
            read.add_done_callback(self._reads.discard)
            try:
                first = await asyncio.shield(read)
            except asyncio.CancelledError:
                # No decode worker takes it.
                read.add_done_callback(partial(self._release_read, prompt.request_id))
                raise
        return Prefilled(
            first=first,
            cached_tokens=min(cached, prompt.tokens),
            queue_s=0.0,
            prefill_s=time.monotonic() - began_s,
        )

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        """Return the hand-off of a held prompt, as bytes of this engine's kind: the keys and values
        go through the library. A prompt of the role both has none: decode reads it again. Raises
        `NotFound`."""
        held = self._held.get(request_id)
        if held is None:
            raise NotFound(f"no prompt is held for request {request_id!r}")
        data = held.hand_off or _NOTHING
        return KvSpan(
            from_token=0,
            tokens=held.prompt_tokens,
            version=held.version,
            dtype="uint8",
            shape=(len(data),),
            data=data,
            fingerprint=FINGERPRINT if held.hand_off else b"",
        )

    def release(self, request_id: str) -> None:
        """See `PrefillEngine`."""
        held = self._held.pop(request_id, None)
        if held is not None:
            held.expiry.cancel()
            if held.answer is not None:
                held.answer.stop()

    async def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        """See `DecodeEngine`. A hand-off of another engine, or of other weights, is not used: the
        prompt is read again."""
        prompt = self._fitting(prompt)
        began_s = time.monotonic()
        held = self._held.pop(prompt.request_id, None)
        if held is not None and held.answer is not None:
            held.expiry.cancel()
            answer = held.answer
        else:
            hand_off = await _received(fetch_kv, prompt)
            answer = self._answer(prompt, first=first, hand_off=hand_off)
        count = len(first.ids)
        try:
            while True:
                tokens = await answer.after(count, whole=not stream)
                count += len(tokens.ids)
                finish = answer.finish
                yield Piece(
                    tokens=tokens,
                    finish=finish,
                    decode_s=time.monotonic() - began_s if finish else 0.0,
                )
                if finish is not None:
                    return
        finally:
            if answer.finish is None:
                answer.stop()

    def _fitting(self, prompt: Prompt) -> Prompt:
        """Return the prompt with an answer that ends at the context limit, where the library would
        refuse it. Raises `UnsupportedByEngines` for a temperature that this version lacks."""
        check_temperature(self._llm.library, prompt.sampling)
        room = self.limits.context_tokens - prompt.tokens
        if prompt.sampling.max_tokens <= room:
            return prompt
        return replace(prompt, sampling=replace(prompt.sampling, max_tokens=room))

    async def _begin(self, prompt: Prompt, hold_s: float) -> Tokens:
        """Start an answer, and hold it with its first token."""
        with self._reading_ids.using(prompt.request_id, self._held):
            answer = self._answer(prompt, hand_off=None)
            try:
                tokens = await answer.after(0)
            except BaseException:
                answer.stop()
                raise
            self._hold(prompt, hold_s, version=tokens.versions[0], answer=answer)
        return part(tokens, 0, 1)

    async def _read_once(self, prompt: Prompt, hold_s: float) -> Tokens:
        with self._reading_ids.using(prompt.request_id, self._held):
            return await self._read(prompt, hold_s)

    def _release_read(self, request_id: str, read: asyncio.Task[Tokens]) -> None:
        # A failed read holds nothing: a prompt of its id is another one.
        if not read.cancelled() and read.exception() is None:
            self.release(request_id)

    async def _read(self, prompt: Prompt, hold_s: float) -> Tokens:
        """Compute a prompt for a decode engine, and hold its hand-off."""
        llm, sampling = self._llm, prompt.sampling
        await llm.gate.passed()
        if not llm.version:
            raise Unavailable("engine 'tensorrt_llm' has no weights yet")
        params = sampling_params(llm.library, sampling, max_tokens=sampling.max_tokens, leg=0)
        # With one token to sample there is nothing to hand over.
        single = sampling.max_tokens == 1
        context = None if single else context_params(llm.library, secrets.randbits(_ID_BITS))
        async with llm.leg(int32_array(prompt.ids), params, hand_off=context) as leg:
            result = await leg.result
        output = result.outputs[0]
        found = read_tokens(output, start=0, sampling=sampling, version=leg.version)
        if not single:
            hand_off = write_hand_off(
                output.disaggregated_params,
                weight_version=leg.version,
                prompt_tokens=prompt.tokens,
            )
            self._hold(prompt, hold_s, version=leg.version, hand_off=hand_off)
        return part(found.tokens(), 0, 1)

    def _hold(
        self,
        prompt: Prompt,
        hold_s: float,
        *,
        version: int,
        answer: LlmAnswer | None = None,
        hand_off: bytes = b"",
    ) -> None:
        loop = asyncio.get_running_loop()
        self._held[prompt.request_id] = _Held(
            prompt_tokens=prompt.tokens,
            version=version,
            answer=answer,
            hand_off=hand_off,
            expiry=loop.call_later(hold_s, self.release, prompt.request_id),
        )

    def _answer(
        self, prompt: Prompt, *, first: Tokens | None = None, hand_off: HandOff | None
    ) -> LlmAnswer:
        self._answers = {one for one in self._answers if not one.is_done}
        answer = LlmAnswer(self._llm, prompt, first=first, hand_off=hand_off)
        self._answers.add(answer)
        return answer

    def _watch(self, owner: ActorRef) -> None:
        if self._settings.cache_events:
            self._watches.append(asyncio.create_task(watch_cache(self._llm, self._cache)))
        self._watches.append(asyncio.create_task(watch_statistics(self._llm)))
        self._llm.died.add_done_callback(lambda died: owner.tell(died.result()))


async def _received(fetch_kv: FetchKv, prompt: Prompt) -> HandOff | None:
    """Return the hand-off of a prefill engine; None if it is not of this kind. Raises
    `RefusedHandOff` for a damaged one, and for one of another prompt."""
    span = await fetch_kv(0)
    if span.fingerprint != FINGERPRINT:
        CONTINUED.labels("kind").inc()
        return None
    try:
        hand_off = read_hand_off(span.data)
    except DataLoss as error:
        raise refused("damaged", str(error)) from error
    if hand_off.prompt_tokens != prompt.tokens:
        # The library would continue the keys and values of the other prompt.
        raise refused(
            "place",
            f"the hand-off is of a prompt of {hand_off.prompt_tokens} tokens, this one has "
            f"{prompt.tokens}",
        )
    return hand_off


async def _settled(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
