"""The calls of one attempt to workers: their placement, their settlement and their errors.

Each placement gets exactly one outcome. Not here: which calls an attempt makes (`attempt`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from forge.core.errors import Unavailable, UnsupportedByEngines
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.rpc.status import ERROR_KEY, from_rpc_error
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import SampledTokens, TurnTimings
from services.inference import codec
from services.inference.config import InferenceConfig
from services.inference.router.fleet.needs import NO_NEEDS, Needs
from services.inference.router.fleet.open_calls import WorkerLost
from services.inference.router.fleet.versions import TooOld
from services.inference.router.fleet.workers import Worker
from services.inference.router.messages import (
    Abandoned,
    Decoded,
    Failed,
    PlaceDecode,
    Placement,
    PlacePrefill,
    Prefilled,
    TokensSampled,
)
from services.inference.router.request.answer import RoutedAnswer
from services.inference.router.request.lost_workers import LostWorkers
from services.inference.router.worker_streams import WorkerStreams

_ASK_TIMEOUT_S = 10.0
_RETRY_PAUSE_S = 0.2
_NOT_REACHED = "failed to connect"
"""gRPC's text of the UNAVAILABLE of a call that reached no process."""

Settle = Callable[[Prefilled | Decoded | Failed], None]
"""Sends the outcome of a placement to the router actor."""


@dataclass(slots=True, kw_only=True)
class WorkerCalls:
    """Calls for one answer, in one attempt."""

    answer: RoutedAnswer
    timings: TurnTimings
    """Gets the times of the calls."""
    session_id: str
    key: str
    """See `PlacePrefill`."""
    stream: bool
    deadline_s: float
    router: ActorRef
    streams: WorkerStreams
    config: InferenceConfig
    lost: LostWorkers
    """Gets the workers that are lost."""
    _needs: Needs = NO_NEEDS

    def __post_init__(self) -> None:
        self._needs = self.answer.needs

    async def _place_prefill(self, request: pb.PrefillRequest, placement: Placement) -> None:
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

    def _prefilled(
        self,
        request: pb.PrefillRequest,
        placement: Placement,
        read: pb.PrefillResponse,
        *,
        decode: Placement | None = None,
    ) -> Prefilled:
        if self.answer.cached_tokens is None:
            self.answer.cached_tokens = read.cached_tokens
        self.timings.queue_s += read.queue_s
        self.timings.prefill_s += read.prefill_s
        return Prefilled(
            placement=placement,
            ids=request.prompt_ids,
            cached_tokens=read.cached_tokens,
            prefill_s=read.prefill_s,
            stored_tokens=read.stored_tokens,
            stored_s=read.stored_s,
            decode=decode,
        )

    async def _in_one_call(
        self, request: pb.PrefillRequest, placement: Placement, settle: Settle
    ) -> AsyncGenerator[None, None]:
        """Prefill and decode on the chosen worker."""
        worker = placement.worker
        decode = self._decode_request(request, prefill=True)
        call = self.streams.decode(worker, decode, timeout_s=self._left_s())
        responses = aiter(call)
        try:
            with worker.calls.during(call), self._refused(worker):
                response = await anext(responses, None)
            if response is None:
                settle(Failed(placement=placement, dead=False))
                raise Unavailable(f"{worker.instance_id} ended its stream without a token")
            read, sampling = response.prefilled, Placement(chosen=worker)
            self._take(read.first, worker)
            if response.finish_reason:
                settle(self._prefilled(request, placement, read))
                self._end(response)
                yield
                return
            with self._settling(sampling) as settle_decode:
                settle(self._prefilled(request, placement, read, decode=sampling))
                yield
                sampled = self._sampled(call, responses, sampling, worker, settle_decode)
                async with aclosing(sampled):
                    async for _ in sampled:
                        yield
        finally:
            call.cancel()

    def _decode_request(
        self,
        request: pb.PrefillRequest,
        source: str = "",
        *,
        first: SampledTokens | None = None,
        early: bool = False,
        prefill: bool = False,
    ) -> pb.DecodeRequest:
        """`source`: address of the worker that has the keys and values."""
        return pb.DecodeRequest(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            stream=self.stream,
            prefill_address=source,
            first=first,
            session_id=self.session_id,
            early=early,
            prefill=prefill,
        )

    async def _sampled(
        self,
        call: Any,
        responses: AsyncIterable[pb.DecodeResponse],
        placement: Placement,
        source: Worker,
        settle: Settle,
    ) -> AsyncGenerator[None, None]:
        """Take the tokens of a decode from the responses of its call."""
        worker, before = placement.worker, self.answer.tokens
        try:
            with worker.calls.during(call), ExitStack() as fetch:
                if source is not worker:
                    fetch.enter_context(source.calls.during(call))
                async for response in responses:
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
        """Raises Unavailable for a finish reason that this release does not know."""
        self.answer.finish = codec.read_finish(response.finish_reason)
        self.timings.queue_s += response.queue_s
        self.timings.decode_s += response.decode_s

    @contextmanager
    def _settling(self, placement: Placement) -> Iterator[Settle]:
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
                self.lost.add(placement.worker, at_token=self.answer.tokens)
                settle(Failed(placement=placement, dead=True))
            raise
        except grpc.aio.AioRpcError as error:
            # A worker that answers with a ForgeError is alive.
            answered = any(key == ERROR_KEY for key, _ in error.trailing_metadata() or ())
            if not settled:
                if not answered and _NOT_REACHED not in (error.details() or ""):
                    self.lost.add(placement.worker, at_token=self.answer.tokens)
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
        self._tell(TokensSampled(tokens=len(tokens.ids) // TOKEN_BYTES))

    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

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

    def _tell(self, message: Prefilled | Decoded | Failed | Abandoned | TokensSampled) -> None:
        if self.router.alive:
            self.router.tell(message)
