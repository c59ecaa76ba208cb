"""One request, from admission to its last token, with its retries.

Keeps the sampled tokens: when a worker dies, evicts the request or loses the keys and values,
another worker prefills prompt and tokens so far and continues. On an engine with positional draws
the answer is the same as without the failure; `needs` has the rules for unlike engines.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
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
from services.inference.engines.base import Prompt
from services.inference.router.answer import Answer
from services.inference.router.messages import (
    Abandoned,
    Admission,
    Admit,
    Decoded,
    Failed,
    Leave,
    PlaceDecode,
    Placement,
    PlacePrefill,
    Prefilled,
    Sampled,
)
from services.inference.router.metrics import STARTED_OVER
from services.inference.router.needs import CannotContinue, Needs
from services.inference.router.open_calls import WorkerLost
from services.inference.router.versions import TooOld
from services.inference.router.workers import Worker

_ASK_TIMEOUT_S = 10.0
_RETRY_PAUSE_S = 0.2
_RELEASE_TIMEOUT_S = 1.0
_MOVES = (Unavailable, DeadlineExceeded, ResourceExhausted, NotFound)
"""Errors that another worker, or a later attempt, can cure."""


class Run:
    """Runs one request."""

    def __init__(
        self,
        request: pb.SampleRequest,
        prompt: Prompt,
        *,
        context_tokens: int,
        router: ActorRef,
        channels: Channels,
        config: InferenceConfig,
    ) -> None:
        """`prompt`: what the request was read to."""
        self._session_id = request.session_id
        self._request_id = prompt.request_id
        self._stream = request.stream
        self._answer = Answer(request, prompt, context_tokens=context_tokens)
        self._router = router
        self._channels = channels
        self._config = config
        self._deadline_s = time.monotonic() + config.request_timeout_s
        self._timings = TurnTimings()
        self._cached_tokens: int | None = None

    async def responses(self) -> AsyncGenerator[pb.SampleResponse, None]:
        """Yield the responses; the last one has a finish reason. Raises Unavailable when no worker
        can continue, UnsupportedByEngines when no engine can serve it, ResourceExhausted when too
        many requests wait."""
        admit = Admit(needs=self._answer.needs)
        try:
            await self._ask(admit)
            await self._granted(admit.admission)
            async with aclosing(self._progress()) as progress:
                async for _ in progress:
                    if self._stream and self._answer.finish is None:
                        for tokens in self._answer.flush():
                            yield self._response(tokens)
            *first, last = self._answer.flush() or [SampledTokens()]
            for tokens in first:
                yield self._response(tokens)
            yield pb.SampleResponse(
                tokens=last,
                finish_reason=codec.write_finish(self._answer.finish),
                timings=self._timings,
                cached_tokens=self._cached_tokens or 0,
                engine=self._answer.engine,
            )
        finally:
            self._tell(Leave(admission=admit.admission))

    def _response(self, tokens: SampledTokens) -> pb.SampleResponse:
        return pb.SampleResponse(tokens=tokens, engine=self._answer.engine)

    async def _granted(self, admission: Admission) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s()):
                await admission.granted
        except TimeoutError:
            raise DeadlineExceeded(
                f"waited {self._config.request_timeout_s:g} s for a free slot"
            ) from None
        self._timings.queue_s += time.monotonic() - began_s

    async def _progress(self) -> AsyncGenerator[None, None]:
        """Make attempts until the finish; yield after new tokens."""
        failing_s: float | None = None
        while self._answer.finish is None:
            began_s = time.monotonic()
            try:
                async with aclosing(self._attempt()) as attempt:
                    async for _ in attempt:
                        failing_s = None
                        yield
            except _MOVES as error:
                if isinstance(error, CannotContinue):
                    if not self._answer.is_sent:
                        self._begin_anew(error)
                        continue
                    if not error.may_return:
                        raise
                now_s = time.monotonic()
                # From the first failure on, since the lost attempt may have run for long.
                failing_s = now_s if failing_s is None else failing_s
                if now_s - failing_s >= self._config.router.worker_wait_s or self._left_s() <= 0:
                    raise self._gave_up(error) from error
                log.debug(
                    "request_moves",
                    request_id=self._request_id,
                    sampled_tokens=self._answer.tokens,
                    error=str(error),
                )
                # A lost attempt counts as waiting.
                self._timings.queue_s += now_s - began_s
                await asyncio.sleep(error.retry_after_s or _RETRY_PAUSE_S)

    def _begin_anew(self, error: CannotContinue) -> None:
        """Sample the answer again from its first token: no engine that is left can resume it."""
        STARTED_OVER.labels(self._answer.needs.unresumed).inc()
        log.info(
            "answer_begins_anew",
            request_id=self._request_id,
            dropped_tokens=self._answer.tokens,
            error=str(error),
        )
        self._answer.begin_anew()

    def _gave_up(self, error: ForgeError) -> ForgeError:
        kind = ResourceExhausted if isinstance(error, ResourceExhausted) else Unavailable
        return kind(
            f"no worker could continue the request within {self._config.router.worker_wait_s:g} s; "
            f"last error: {error}",
            retry_after_s=1.0,
        )

    async def _attempt(self) -> AsyncGenerator[None, None]:
        """Prefill prompt and tokens so far, then sample until the end or a failure."""
        request = pb.PrefillRequest(
            # A new id: the leftovers of an earlier attempt must not be taken for this one's.
            request_id=secrets.token_hex(8),
            prompt_ids=self._answer.ids,
            sampling=self._answer.rest(),
            hold_s=self._config.router.hold_s,
            session_id=self._session_id,
        )
        needs = self._answer.needs
        source, read = await self._prefill(request, needs)
        address = source.address
        self._take(read.first, source)
        first = SampledTokens()
        first.CopyFrom(read.first)
        first.ClearField("routed_experts")
        self._answer.end_with(read.first)
        yield
        if self._answer.finish is not None:
            await self._release_kv(address, request.request_id)
            return
        decode = self._decode(
            pb.DecodeRequest(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                stream=self._stream,
                prefill_address=address,
                first=first,
                session_id=self._session_id,
            ),
            source,
            needs,
        )
        fetched = False
        try:
            async with aclosing(decode):
                async for _ in decode:
                    fetched = True
                    yield
        except _MOVES:
            # The next attempt prefills again: free the memory of this one.
            if not fetched:
                await self._release_kv(address, request.request_id)
            raise

    async def _release_kv(self, address: str, request_id: str) -> None:
        """Free a held prompt; on failure prefill drops it after `hold_s`."""
        release = pb.ReleaseKvRequest(request_id=request_id, session_id=self._session_id)
        with suppress(grpc.aio.AioRpcError):
            await self._prefill_stub(address).ReleaseKv(release, timeout=_RELEASE_TIMEOUT_S)

    async def _prefill(
        self, request: pb.PrefillRequest, needs: Needs
    ) -> tuple[Worker, pb.PrefillResponse]:
        """Prefill on the cheapest worker; return it and its response."""
        placement = Placement()
        with self._settling(placement) as settle:
            await self._place(
                PlacePrefill(
                    ids=request.prompt_ids,
                    session=self._session_id,
                    key=self._session_id or self._request_id,
                    floor=self._answer.version,
                    needs=needs,
                    placement=placement,
                )
            )
            worker = placement.worker
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
        if self._cached_tokens is None:
            self._cached_tokens = read.cached_tokens
        self._timings.queue_s += read.queue_s
        self._timings.prefill_s += read.prefill_s
        return worker, read

    async def _decode(
        self, request: pb.DecodeRequest, source: Worker, needs: Needs
    ) -> AsyncGenerator[None, None]:
        """Decode on the cheapest worker; `source` has the keys and values."""
        placement = Placement()
        with self._settling(placement) as settle:
            # While it waits, prefill holds the keys and values.
            await self._place(
                PlaceDecode(
                    ids=request.prompt_ids,
                    session=self._session_id,
                    floor=self._answer.version,
                    read_by=source,
                    needs=needs,
                    placement=placement,
                )
            )
            worker = placement.worker
            before = self._answer.tokens
            stub = rpc.DecodeServiceStub(self._channels.get(worker.address))
            call = stub.Decode(request, timeout=self._left_s())
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
                                ids=self._answer.ids,
                                decode_s=response.decode_s,
                                tokens=self._answer.tokens - before,
                                fetched_tokens=response.fetched_tokens,
                                fetch_s=response.fetch_s,
                            )
                            settle(decoded)
                        yield
            finally:
                # When the caller leaves, decoding stops within a step.
                call.cancel()
            if self._answer.finish is None:
                settle(Failed(placement=placement, dead=False))
                raise Unavailable(f"{worker.instance_id} ended its stream without a finish reason")

    def _end(self, response: pb.DecodeResponse) -> None:
        self._answer.finish = codec.read_finish(response.finish_reason)
        self._timings.queue_s += response.queue_s
        self._timings.decode_s += response.decode_s

    @contextmanager
    def _settling(
        self, placement: Placement
    ) -> Iterator[Callable[[Prefilled | Decoded | Failed], None]]:
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
                self._answer.refuse(worker.engine, str(refused))
                raise Unavailable(str(refused)) from error
            raise

    def _take(self, tokens: SampledTokens, worker: Worker) -> None:
        self._answer.take(tokens, worker.engine)
        self._tell(Sampled(tokens=len(tokens.ids) // TOKEN_BYTES))

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _prefill_stub(self, address: str) -> rpc.PrefillServiceAsyncStub:
        return rpc.PrefillServiceStub(self._channels.get(address))

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

    async def _ask(self, message: Admit | PlacePrefill | PlaceDecode) -> Any:
        return await self._router.ask(message, timeout_s=_ASK_TIMEOUT_S)

    def _tell(self, message: Prefilled | Decoded | Failed | Abandoned | Sampled | Leave) -> None:
        if self._router.alive:
            self._router.tell(message)
