"""A router actor and workers of the role both behind networks that cut: real gRPC, an engine that
counts calls and fails a given number of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from forge.core.errors import ResourceExhausted
from forge.core.token_columns import int32_bytes
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SamplingParams
from services.inference import codec
from services.inference.config import InferenceConfig
from services.inference.engines.base import FetchKv, ModelLimits, Piece, Prefilled, Prompt, Tokens
from services.inference.engines.provider import EngineOptions
from services.inference.router.messages import Report
from services.inference.router.request.request import Run
from services.inference.router.worker_streams import WorkerStreams
from services.inference.worker.service import DecodeServicer, PrefillServicer
from services.inference.worker.worker_stream import WorkerServicer
from tests.support.inference.counting_engine import CountingEngine
from tests.support.inference.router import Harness, announced
from tests.support.inference.weight_sources import SECURITY
from tests.support.runtime.cut_connection import ADDRESS, CuttingProxy

LIMITS = ModelLimits(context_tokens=100, vocabulary=1000)


class Engine(CountingEngine):
    """Counts its calls, and fails a given number of them."""

    def __init__(self) -> None:
        super().__init__(
            EngineOptions(
                model_path="", dtype="float32", context_tokens=100, request_timeout_s=60.0
            )
        )
        self.calls: list[str] = []
        self.failing: list[str] = []
        self.waits_after = 0
        """Tokens of a decode behind which it waits for `goes_on`; 0: it gives all at once."""
        self.goes_on = asyncio.Event()
        self.on_prefill: Callable[[], None] = lambda: None
        """Called before each prefill."""

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        self._enter("prefill")
        self.on_prefill()
        return await super().prefill(prompt, hold_s=hold_s)

    async def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        self._enter("decode")
        async for piece in super().decode(prompt, first, fetch_kv, stream=stream):
            if not self.waits_after:
                yield piece
                continue
            for number, token in enumerate(piece.tokens.ids, 1):
                yield Piece(tokens=self._tokens(token))
                if number == self.waits_after:
                    await self.goes_on.wait()
            yield replace(piece, tokens=Tokens())

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failing:
            self.failing.remove(call)
            raise ResourceExhausted(f"{call} has no memory", retry_after_s=0.01)

    @property
    def held(self) -> int:
        return len(self._prompts)


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A router actor and workers of the role both, with one engine."""

    networks: list[CuttingProxy]
    """One on the way to each worker."""
    engine: Engine
    harness: Harness
    router: Any
    streams: WorkerStreams
    rpcs: list[str] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def run(self, **sampling: Any) -> AsyncGenerator[pb.SampleResponse, None]:
        params = SamplingParams(temperature=0.0, top_p=1.0, **{"max_tokens": 5, **sampling})
        request = pb.SampleRequest(
            request_id="r",
            prompt_ids=int32_bytes([1, 2, 3]),
            sampling=params,
            stream=True,
            session_id="s:0:0",
        )
        prompt = codec.read_prompt(request, LIMITS, seed=1)
        return Run(
            request,
            prompt,
            context_tokens=100,
            router=self.router,
            streams=self.streams,
            config=InferenceConfig(),
        ).responses()

    async def answer(self, **sampling: Any) -> tuple[list[int], int]:
        """Tokens and finish reason."""
        ids: list[int] = []
        self.answers.append(ids)
        async for response in self.run(**sampling):
            ids += codec.read_tokens(response.tokens).ids
        return ids, response.finish_reason

    def taken(self) -> list[int]:
        """Tokens of each answer so far."""
        return [len(ids) for ids in self.answers]

    async def is_idle(self) -> bool:
        """No prompt is held, and the router counts no load."""
        await self.router.ask(Report(), timeout_s=10)
        return not self.engine.held and not any(one.running for one in self.harness.workers)


@asynccontextmanager
async def cluster(
    *, announces: bool = True, streams: bool = True, workers: int = 1
) -> AsyncIterator[Cluster]:
    """`announces`: the worker says that it can read and sample in one call, `streams`: that it
    takes its calls on a stream; those of earlier releases do not. `workers`: in discovery, all
    served by one process, each on a network of its own."""
    engine, system = Engine(), ActorSystem("test")
    served: Any = engine
    networks = [CuttingProxy() for _ in range(workers)]
    server = RpcServer(service="decode", host="127.0.0.1", port=0, security=SECURITY)
    channels = Channels(SECURITY)
    kept = WorkerStreams(channels)
    rpcs: list[str] = []

    class Prefills(PrefillServicer):
        async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
            rpcs.append("Prefill")
            return await super().Prefill(request, context)

    class Decodes(DecodeServicer):
        async def Decode(
            self, request: pb.DecodeRequest, context: Any
        ) -> AsyncIterator[pb.DecodeResponse]:
            rpcs.append("Decode")
            async for response in super().Decode(request, context):
                yield response

    prefills = Prefills(served)
    decodes = Decodes(served, channels, silence_s=10, local=served)
    server.add_service(
        rpc.add_PrefillServiceServicer_to_server, prefills, full_name="forge.v1.PrefillService"
    )
    server.add_service(
        rpc.add_DecodeServiceServicer_to_server, decodes, full_name="forge.v1.DecodeService"
    )
    server.add_service(
        rpc.add_WorkerServiceServicer_to_server,
        WorkerServicer(prefill=prefills, decode=decodes),
        full_name="forge.v1.WorkerService",
    )
    address = await server.start()
    for network in networks:
        await network.start(to_port=int(address.rpartition(":")[2]))
    can: Any = {"role": "both"} | ({"prefills_in_decode": "1"} if announces else {})
    can |= {"worker_stream": "1"} if streams else {}
    harness = Harness(
        *(
            announced(f"b{number}", "decode", address=f"{ADDRESS}:{network.port}", **can)
            for number, network in enumerate(networks)
        )
    )
    router = await system.spawn(lambda: harness.actor, name="router")
    try:
        yield Cluster(
            networks=networks,
            engine=engine,
            harness=harness,
            router=router,
            streams=kept,
            rpcs=rpcs,
        )
    finally:
        await kept.close()
        await system.stop()
        await channels.close()
        await server.stop(grace_s=0)
        for network in networks:
            await network.close()
