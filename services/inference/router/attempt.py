"""One attempt of a request: prefill on one worker, then decode on one, with their placements.

A long prompt is handed over early: its decode worker is chosen with its prefill worker, and fetches
keys and values while they are computed. If that fails, another worker fetches the prompt after its
prefill.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio

from forge.core.errors import (
    DeadlineExceeded,
    ForgeError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    UnsupportedByEngines,
)
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.status import ERROR_KEY, from_rpc_error
from forge.runtime.telemetry import log
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SampledTokens, TurnTimings
from services.inference import codec
from services.inference.config import InferenceConfig
from services.inference.router.answer import Answer
from services.inference.router.messages import (
    Abandoned,
    Decoded,
    Failed,
    PlaceDecode,
    Placement,
    PlacePrefill,
    Prefilled,
    Sampled,
)
from services.inference.router.metrics import EARLY_DECODES
from services.inference.router.needs import NO_NEEDS, Needs
from services.inference.router.open_calls import WorkerLost
from services.inference.router.versions import TooOld
from services.inference.router.workers import Worker

MOVES = (Unavailable, DeadlineExceeded, ResourceExhausted, NotFound)
"""Errors that another worker, or a later attempt, can cure."""
_ASK_TIMEOUT_S = 10.0
_RETRY_PAUSE_S = 0.2
_RELEASE_TIMEOUT_S = 1.0

_Settle = Callable[[Prefilled | Decoded | Failed], None]


@dataclass(frozen=True, slots=True)
class _EarlyDecode:
    """A decode that began with the prefill of its prompt."""

    placement: Placement
    call: Any


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Continues an answer on the cheapest workers."""

    answer: Answer
    timings: TurnTimings
    """Gets the times of the calls."""
    session_id: str
    key: str
    """See `PlacePrefill`."""
    stream: bool
    deadline_s: float
    router: ActorRef
    channels: Channels
    config: InferenceConfig
    _needs: Needs = NO_NEEDS
    _early: _EarlyDecode | None = None

    def __post_init__(self) -> None:
        self._needs = self.answer.needs

    async def run(self) -> AsyncGenerator[None, None]:
        """Prefill prompt and tokens so far, then sample until the end or a failure; yield after new
        tokens."""
        request = pb.PrefillRequest(
            # A new id: the leftovers of an earlier attempt must not be taken for this one's.
            request_id=secrets.token_hex(8),
            prompt_ids=self.answer.ids,
            sampling=self.answer.rest(),
            hold_s=self.config.router.hold_s,
            session_id=self.session_id,
        )
        try:
            source, read = await self._prefill(request)
            self._take(read.first, source)
            first = SampledTokens()
            first.CopyFrom(read.first)
            first.ClearField("routed_experts")
            self.answer.end_with(read.first)
            yield
            if self.answer.finish is not None:
                await self._release_kv(source.address, request.request_id)
                return
            fetched = False
            try:
                decode = self._decode(self._decode_request(request, source, first), source)
                async with aclosing(decode):
                    async for _ in decode:
                        fetched = True
                        yield
            except MOVES:
                # The next attempt prefills again: free the memory of this one.
                if not fetched:
                    await self._release_kv(source.address, request.request_id)
                raise
        finally:
            self._drop_early()

    def _decode_request(
        self, request: pb.PrefillRequest, source: Worker, first: SampledTokens | None
    ) -> pb.DecodeRequest:
        return pb.DecodeRequest(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            stream=self.stream,
            prefill_address=source.address,
            first=first,
            session_id=self.session_id,
            early=first is None,
        )

    async def _release_kv(self, address: str, request_id: str) -> None:
        """Free a held prompt; on failure prefill drops it after `hold_s`."""
        release = pb.ReleaseKvRequest(request_id=request_id, session_id=self.session_id)
        with suppress(grpc.aio.AioRpcError):
            await self._prefill_stub(address).ReleaseKv(release, timeout=_RELEASE_TIMEOUT_S)

    async def _prefill(self, request: pb.PrefillRequest) -> tuple[Worker, pb.PrefillResponse]:
        """Prefill on the cheapest worker; return it and its response."""
        placement = Placement()
        with self._settling(placement) as settle:
            await self._place(
                PlacePrefill(
                    ids=request.prompt_ids,
                    session=self.session_id,
                    key=self.key,
                    floor=self.answer.version,
                    needs=self._needs,
                    placement=placement,
                )
            )
            worker = placement.worker
            await self._begin_early(request, placement)
            call = self._prefill_stub(worker.address).Prefill(request, timeout=self._left_s())
            with worker.calls.during(call), self._refused(worker):
                read = await call
            settle(
                Prefilled(
                    placement=placement,
                    ids=request.prompt_ids,
                    cached_tokens=read.cached_tokens,
                    prefill_s=read.prefill_s,
                    stored_tokens=read.stored_tokens,
                    stored_s=read.stored_s,
                )
            )
        if self.answer.cached_tokens is None:
            self.answer.cached_tokens = read.cached_tokens
        self.timings.queue_s += read.queue_s
        self.timings.prefill_s += read.prefill_s
        return worker, read

    async def _begin_early(self, request: pb.PrefillRequest, read_by: Placement) -> None:
        """Let a decode worker fetch the prompt while it is computed, if it is long and a worker is
        there that can."""
        least = self.config.router.early_hand_off_tokens
        source = read_by.worker
        if not least or read_by.tokens < least or source.samples or request.sampling.max_tokens < 2:
            return
        placement = Placement()
        message = PlaceDecode(
            ids=request.prompt_ids,
            session=self.session_id,
            floor=self.answer.version,
            read_by=source,
            early=True,
            needs=self._needs,
            placement=placement,
        )
        try:
            await self._ask(message)
        except ForgeError:
            # None can; a decode worker is chosen after the prefill.
            self._tell(Abandoned(placement=placement))
            return
        except BaseException:
            self._tell(Abandoned(placement=placement))
            raise
        stub = rpc.DecodeServiceStub(self.channels.get(placement.worker.address))
        call = stub.Decode(self._decode_request(request, source, None), timeout=self._left_s())
        self._early = _EarlyDecode(placement, call)

    def _drop_early(self) -> None:
        """End the early decode; its answer is not needed."""
        early, self._early = self._early, None
        if early is not None:
            early.call.cancel()
            self._tell(Abandoned(placement=early.placement))
            EARLY_DECODES.labels("dropped").inc()

    async def _decode(
        self, request: pb.DecodeRequest, source: Worker
    ) -> AsyncGenerator[None, None]:
        """Decode on the worker that has fetched the prompt early, else on the cheapest; `source`
        has the keys and values."""
        early = self._early
        if early is not None and early.placement.worker.version < self.answer.version:
            # Prefill has swapped before the prompt began; an answer's versions do not fall.
            self._drop_early()
            early = None
        if early is not None:
            self._early = None
            is_used = False
            try:
                with self._settling(early.placement) as settle:
                    sampled = self._sampled(early.call, early.placement, source, settle)
                    async with aclosing(sampled):
                        async for _ in sampled:
                            if not is_used:
                                EARLY_DECODES.labels("used").inc()
                                is_used = True
                            yield
                return
            except MOVES as error:
                if is_used:
                    raise
                EARLY_DECODES.labels("failed").inc()
                log.debug("early_decode_failed", error=str(error))
        placement = Placement()
        with self._settling(placement) as settle:
            # While it waits, prefill holds the keys and values.
            await self._place(
                PlaceDecode(
                    ids=request.prompt_ids,
                    session=self.session_id,
                    floor=self.answer.version,
                    read_by=source,
                    needs=self._needs,
                    placement=placement,
                )
            )
            stub = rpc.DecodeServiceStub(self.channels.get(placement.worker.address))
            call = stub.Decode(request, timeout=self._left_s())
            sampled = self._sampled(call, placement, source, settle)
            async with aclosing(sampled):
                async for _ in sampled:
                    yield

    async def _sampled(
        self, call: Any, placement: Placement, source: Worker, settle: _Settle
    ) -> AsyncGenerator[None, None]:
        """Take the tokens of a decode."""
        worker, before = placement.worker, self.answer.tokens
        try:
            with worker.calls.during(call), ExitStack() as fetch:
                if source is not worker:
                    fetch.enter_context(source.calls.during(call))
                async for response in call:
                    fetch.close()
                    self._take(response.tokens, worker)
                    if response.finish_reason:
                        self._end(response)
                        decoded = Decoded(
                            placement=placement,
                            ids=self.answer.ids,
                            decode_s=response.decode_s,
                            tokens=self.answer.tokens - before,
                            fetched_tokens=response.fetched_tokens,
                            fetch_s=response.fetch_s,
                        )
                        settle(decoded)
                    yield
        finally:
            # When the caller leaves, decoding stops within a step.
            call.cancel()
        if self.answer.finish is None:
            settle(Failed(placement=placement, dead=False))
            raise Unavailable(f"{worker.instance_id} ended its stream without a finish reason")

    def _end(self, response: pb.DecodeResponse) -> None:
        self.answer.finish = codec.read_finish(response.finish_reason)
        self.timings.queue_s += response.queue_s
        self.timings.decode_s += response.decode_s

    @contextmanager
    def _settling(self, placement: Placement) -> Iterator[_Settle]:
        """Around a placement and its call: the router actor gets exactly one answer."""
        settled = False

        def settle(answer: Prefilled | Decoded | Failed) -> None:
            nonlocal settled
            settled = True
            self._tell(answer)

        try:
            yield settle
        except WorkerLost:
            if not settled and placement.worker.calls.lost:
                settle(Failed(placement=placement, dead=True))
            raise
        except grpc.aio.AioRpcError as error:
            # A worker that answers with a ForgeError is alive.
            answered = any(key == ERROR_KEY for key, _ in error.trailing_metadata() or ())
            if not settled:
                settle(Failed(placement=placement, dead=not answered))
            raise from_rpc_error(error) from error
        finally:
            if not settled:
                self._tell(Abandoned(placement=placement))

    @contextmanager
    def _refused(self, worker: Worker) -> Iterator[None]:
        """Around a call to a worker. A refusal for an ability excludes its engine, and the request
        moves to another one."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            refused = from_rpc_error(error)
            if isinstance(refused, UnsupportedByEngines):
                self.answer.refuse(worker.engine, str(refused))
                raise Unavailable(str(refused)) from error
            raise

    def _take(self, tokens: SampledTokens, worker: Worker) -> None:
        self.answer.take(tokens, worker.engine)
        self._tell(Sampled(tokens=len(tokens.ids) // TOKEN_BYTES))

    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def _prefill_stub(self, address: str) -> rpc.PrefillServiceAsyncStub:
        return rpc.PrefillServiceStub(self.channels.get(address))

    async def _place(self, message: PlacePrefill | PlaceDecode) -> None:
        """Place the request; wait while all workers have older weights than its tokens."""
        while True:
            try:
                await self._ask(message)
                return
            except TooOld:
                if self._left_s() <= 0:
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _ask(self, message: PlacePrefill | PlaceDecode) -> Any:
        return await self.router.ask(message, timeout_s=_ASK_TIMEOUT_S)

    def _tell(self, message: Prefilled | Decoded | Failed | Abandoned | Sampled) -> None:
        if self.router.alive:
            self.router.tell(message)
