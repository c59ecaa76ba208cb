"""One request, from admission to its last token, with its retries.

Keeps the sampled tokens: when a worker dies, evicts the request or loses the keys and values,
another worker prefills prompt and tokens so far and continues. On an engine with positional draws
the answer is the same as without the failure; `needs` has the rules for unlike engines. `attempt`
has the calls of one attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from forge.core.errors import (
    DeadlineExceeded,
    ForgeError,
    ResourceExhausted,
    Unavailable,
)
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.telemetry import log
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import SampledTokens, TurnTimings
from services.inference import codec
from services.inference.config import InferenceConfig
from services.inference.engines.base import Prompt
from services.inference.router.fleet.needs import CannotContinue
from services.inference.router.messages import Admit, Leave, QueuePlace
from services.inference.router.metrics import STARTED_OVER
from services.inference.router.request.answer import RoutedAnswer
from services.inference.router.request.attempt import MOVES, SampleAttempt
from services.inference.router.request.lost_workers import LostWorkers
from services.inference.router.worker_streams import WorkerStreams

_ASK_TIMEOUT_S = 10.0
_RETRY_PAUSE_S = 0.2


class Run:
    """Runs one request."""

    def __init__(
        self,
        request: pb.SampleRequest,
        prompt: Prompt,
        *,
        context_tokens: int,
        router: ActorRef,
        streams: WorkerStreams,
        config: InferenceConfig,
    ) -> None:
        """`prompt`: the decoded request."""
        self._session_id = request.session_id
        self._request_id = prompt.request_id
        self._stream = request.stream
        self._answer = RoutedAnswer(request, prompt, context_tokens=context_tokens)
        self._router = router
        self._streams = streams
        self._config = config
        self._deadline_s = time.monotonic() + config.request_timeout_s
        self._timings = TurnTimings()
        self._lost = LostWorkers()

    async def responses(self) -> AsyncGenerator[pb.SampleResponse, None]:
        """Yield the responses; the last one has a finish reason. Raises Unavailable when no worker
        can continue, UnsupportedByEngines when no engine can serve it, ResourceExhausted when too
        many requests wait, WorkersLost when the request has lost too many workers."""
        admit = Admit(needs=self._answer.needs)
        try:
            await self._router.ask(admit, timeout_s=_ASK_TIMEOUT_S)
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
                cached_tokens=self._answer.cached_tokens or 0,
                engine=self._answer.engine,
            )
        finally:
            if self._router.alive:
                self._router.tell(Leave(admission=admit.admission))

    def _response(self, tokens: SampledTokens) -> pb.SampleResponse:
        return pb.SampleResponse(tokens=tokens, engine=self._answer.engine)

    async def _granted(self, admission: QueuePlace) -> None:
        if admission.granted.done():
            admission.granted.result()
            return
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
                async with aclosing(self._attempt().run()) as attempt:
                    async for _ in attempt:
                        failing_s = None
                        yield
            except MOVES as error:
                if self._answer.end_if_complete():
                    return  # The finish reason was lost, and no token.
                self._lost.check()
                if isinstance(error, CannotContinue):
                    if not self._answer.is_sent:
                        self._resample(error)
                        continue
                    if not error.may_return:
                        raise
                now_s = time.monotonic()
                # From the first failure on, since the lost attempt may have run for long.
                failing_s = now_s if failing_s is None else failing_s
                if now_s - failing_s >= self._config.router.worker_wait_s or self._left_s() <= 0:
                    raise self._gave_up(error) from error
                log.debug(
                    "request_moved",
                    request_id=self._request_id,
                    sampled_tokens=self._answer.tokens,
                    error=str(error),
                )
                # A lost attempt counts as waiting.
                self._timings.queue_s += now_s - began_s
                await asyncio.sleep(error.retry_after_s or _RETRY_PAUSE_S)

    def _attempt(self) -> SampleAttempt:
        return SampleAttempt(
            answer=self._answer,
            timings=self._timings,
            session_id=self._session_id,
            key=self._session_id or self._request_id,
            stream=self._stream,
            deadline_s=self._deadline_s,
            router=self._router,
            streams=self._streams,
            config=self._config,
            lost=self._lost,
        )

    def _resample(self, error: CannotContinue) -> None:
        """Sample the answer again from its first token: no engine that is left can resume it."""
        STARTED_OVER.labels(self._answer.needs.unresumed).inc()
        log.info(
            "answer_resampled",
            request_id=self._request_id,
            dropped_tokens=self._answer.tokens,
            error=str(error),
        )
        self._answer.reset()

    def _gave_up(self, error: ForgeError) -> ForgeError:
        kind = ResourceExhausted if isinstance(error, ResourceExhausted) else Unavailable
        return kind(
            f"no worker could continue the request within {self._config.router.worker_wait_s:g} s; "
            f"last error: {error}",
            retry_after_s=1.0,
        )

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())
