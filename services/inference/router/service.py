"""InferenceService: decode, run, encode."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.tracing import is_tracing
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference import codec
from services.inference.config import InferenceConfig
from services.inference.engines.base import ModelLimits
from services.inference.router.messages import Report
from services.inference.router.request.request import Run
from services.inference.router.sample_span import with_span
from services.inference.router.sample_stream import SampleStreams
from services.inference.router.worker_streams import WorkerStreams

_ASK_TIMEOUT_S = 10.0


class InferenceServicer(rpc.InferenceServiceServicer):
    """The RPCs of a router; inference.proto has their contracts."""

    def __init__(
        self,
        router: ActorRef,
        streams: WorkerStreams,
        limits: ModelLimits,
        config: InferenceConfig,
    ) -> None:
        self._router = router
        self._workers = streams
        self._limits = limits
        self._config = config
        self._streams = SampleStreams(self._sample, interval_s=config.router.stream_interval_s)

    async def drain(self) -> None:
        """Refuse new calls on kept streams; each ends when its open calls have."""
        self._streams.drain()

    async def Sample(
        self, request: pb.SampleRequest, context: Any
    ) -> AsyncIterator[pb.SampleResponse]:
        """Sample one answer."""
        async with aclosing(self._sample(request)) as responses:
            async for response in responses:
                yield response

    async def SampleStream(
        self, requests: AsyncIterator[pb.SampleStreamRequest], context: Any
    ) -> AsyncIterator[pb.SampleStreamResponse]:
        """Sample many answers on one stream."""
        async with aclosing(self._streams.serve(requests)) as responses:
            async for response in responses:
                yield response

    def _sample(self, request: pb.SampleRequest) -> AsyncGenerator[pb.SampleResponse, None]:
        return with_span(self._run, request) if is_tracing() else self._run(request)

    def _run(self, request: pb.SampleRequest) -> AsyncGenerator[pb.SampleResponse, None]:
        prompt = codec.read_prompt(request, self._limits)
        run = Run(
            request,
            prompt,
            context_tokens=self._limits.context_tokens,
            router=self._router,
            streams=self._workers,
            config=self._config,
        )
        return run.responses()

    async def GetInferenceStatus(
        self, request: pb.GetInferenceStatusRequest, context: Any
    ) -> pb.GetInferenceStatusResponse:
        """Return model, workers and load."""
        status: pb.GetInferenceStatusResponse = await self._router.ask(
            Report(), timeout_s=_ASK_TIMEOUT_S
        )
        status.model = Path(self._config.model_path).name
        status.context_tokens = self._limits.context_tokens
        return status
