"""One request through a router's actor to workers that answer by script, over real sockets: by one
RPC for each call, as of a worker of an earlier release, and on a kept stream."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from forge.core.errors import DeadlineExceeded, Unavailable, UnsupportedByEngines
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.coordination import Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import CHUNK_BYTES
from forge.runtime.rpc.status import ERROR_KEY
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_UNSPECIFIED,
    SampledTokens,
    SamplingParams,
)
from services.inference import codec
from services.inference.config import InferenceConfig, RouterSettings
from services.inference.engines.base import Prompt
from services.inference.engines.capabilities import Capabilities
from services.inference.router import worker_streams
from services.inference.router.actor import RouterActor
from services.inference.router.admission_queue import MIN_ADMITTED
from services.inference.router.messages import FleetChanged, Report
from services.inference.router.metrics import STARTED_OVER
from services.inference.router.request import request as request_module
from services.inference.router.request import worker_calls
from services.inference.router.request.request import Run
from services.inference.router.worker_streams import WorkerStreams
from services.inference.worker.worker_stream import WorkerServicer
from tests.support.inference.streamed_worker import StreamedWorker
from tests.support.runtime.waiting import until

CONFIG = InferenceConfig(
    request_timeout_s=300.0, router=RouterSettings(worker_wait_s=30.0, hold_s=30.0)
)

STREAMED = ""
"""In the directory entries of workers: whether their calls are on a stream."""


@pytest.fixture(autouse=True, params=["", "1"], ids=["rpc", "stream"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs both ways."""
    monkeypatch.setattr(sys.modules[__name__], "STREAMED", request.param)


def tokens(*ids: int, top: int = 0) -> SampledTokens:
    return SampledTokens(
        ids=array("i", ids).tobytes(),
        logprobs=array("f", [-0.5] * len(ids)).tobytes(),
        weight_versions=array("i", [1] * len(ids)).tobytes(),
        top_ids=array("i", [7] * top * len(ids)).tobytes(),
        top_logprobs=array("f", [-0.5] * top * len(ids)).tobytes(),
    )


class Worker(rpc.PrefillServiceServicer, rpc.DecodeServiceServicer):
    """Samples 0, 1, 2, ... in portions, and ends at the most that are asked for."""

    def __init__(self) -> None:
        self.portion = 64
        self.address = ""
        self.takes_s: list[float] = []
        """How long each of the next prefills takes, before the worker gives it up."""
        self.now_s = 0.0
        self.refusals = 0
        """Decodes that are yet to be refused, before anything was fetched."""
        self.held: set[str] = set()
        self.prefills = 0
        self.unsupported = ""
        """Why it refuses each prefill; "" if it does not."""
        self.freezes = ""
        """The RPC that gives no answer, the first time: Prefill, FetchKv or Decode."""
        self.frozen = asyncio.Event()

    async def _freeze(self, rpc_name: str) -> None:
        if self.freezes == rpc_name:
            self.freezes = ""
            self.frozen.set()
            await asyncio.Event().wait()

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        if self.takes_s:
            self.now_s += self.takes_s.pop(0)
            of_ours = ((ERROR_KEY, "Unavailable"),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gave way", of_ours)
        self.prefills += 1
        if self.unsupported:
            refusal = ((ERROR_KEY, "UnsupportedByEngines"),)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.unsupported, refusal)
        await self._freeze("Prefill")
        self.held.add(request.request_id)
        return pb.PrefillResponse(first=tokens(0, top=request.sampling.top_logprobs))

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: Any) -> pb.ReleaseKvResponse:
        self.held.discard(request.request_id)
        return pb.ReleaseKvResponse()

    async def Decode(
        self, request: pb.DecodeRequest, context: Any
    ) -> AsyncIterator[pb.DecodeResponse]:
        if self.refusals:
            self.refusals -= 1
            of_ours = ((ERROR_KEY, "ResourceExhausted"),)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many wait", of_ours)
        await self._freeze("FetchKv")
        self.held.discard(request.request_id)
        most, top = request.sampling.max_tokens, request.sampling.top_logprobs
        for start in range(1, most, self.portion):
            if start > 1:
                await self._freeze("Decode")
            end = min(most, start + self.portion)
            yield pb.DecodeResponse(
                tokens=tokens(*range(start, end), top=top),
                finish_reason=FINISH_REASON_LENGTH if end == most else FINISH_REASON_UNSPECIFIED,
            )


@dataclass(frozen=True)
class Routed:
    """A router in front of a worker."""

    router: ActorRef
    streams: WorkerStreams
    discoveries: Sequence[Any]
    silent: set[str]
    """Addresses that answer no ping."""

    def lose(self, kind: str) -> None:
        """Replaces the instance of a kind by another one at the same address, as after a lost
        lease."""
        (discovery,) = (one for one in self.discoveries if one.kind == kind)
        (lost,) = discovery.instances
        discovery.instances = [replace(lost, instance_id=f"new-{kind}")]
        self.router.tell(FleetChanged())

    def run(self, *, most: int, stream: bool = False, **sampling: Any) -> Run:
        request = pb.SampleRequest(
            request_id="r",
            prompt_ids=array("i", [1, 2, 3]).tobytes(),
            sampling=SamplingParams(max_tokens=most, **sampling),
            stream=stream,
        )
        read = codec.read_sampling(request.sampling, seed=0)
        return Run(
            request,
            Prompt(request_id="r", ids=request.prompt_ids, sampling=read),
            context_tokens=1 << 20,
            router=self.router,
            streams=self.streams,
            config=CONFIG,
        )

    async def running(self) -> list[int]:
        """Requests that the router counts as each worker's."""
        report = await self.router.ask(Report(), timeout_s=10.0)
        return [worker.running + worker.queued for worker in report.workers]


@asynccontextmanager
async def routed(worker: Worker, **metadata: str) -> AsyncIterator[Routed]:
    """The worker does both prefill and decode; `metadata`: of its directory entries."""
    server = grpc.aio.server()
    rpc.add_PrefillServiceServicer_to_server(worker, server)
    rpc.add_DecodeServiceServicer_to_server(worker, server)
    scripted: Any = StreamedWorker(worker)
    servicer = WorkerServicer(prefill=scripted, decode=scripted)
    rpc.add_WorkerServiceServicer_to_server(servicer, server)
    worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    actors = ActorSystem("test")
    channels = Channels(Security(Keyring.from_bytes(b"k" * 32)))
    streams = WorkerStreams(channels)
    discoveries = [
        SimpleNamespace(
            kind=kind,
            instances=[
                Instance(
                    kind=kind,
                    instance_id=kind,
                    address=worker.address,
                    metadata={"capacity": "4", "worker_stream": STREAMED, **metadata},
                    revision=1,
                )
            ],
        )
        for kind in ("prefill", "decode")
    ]
    silent: set[str] = set()

    async def ping(address: str) -> None:
        if address in silent:
            raise DeadlineExceeded("no answer")

    router: ActorRef = await actors.spawn(
        lambda: RouterActor(cast(Any, discoveries), queue_limit=4, ping=ping), name="router"
    )

    yield Routed(router, streams, discoveries, silent)
    await actors.stop()
    await streams.close()
    await channels.close()
    await server.stop(None)


async def test_long_answer_is_sent_in_bounded_messages() -> None:
    """Ten times the size of a message, unstreamed: in parts, in order, with every column, and the
    end with the last of them."""
    worker = Worker()
    async with routed(worker) as one:
        most = 60_000
        said = [r async for r in one.run(most=most, top_logprobs=20).responses()]
    assert [bool(response.finish_reason) for response in said] == [False] * (len(said) - 1) + [True]
    assert max(response.ByteSize() for response in said) <= CHUNK_BYTES + 100
    ids = array("i", b"".join(response.tokens.ids for response in said))
    assert list(ids) == list(range(most))
    assert sum(len(response.tokens.top_ids) for response in said) == 4 * 20 * most


async def test_short_answer_is_one_message() -> None:
    """Unstreamed, all of it with its end."""
    async with routed(Worker()) as one:
        (whole,) = [r async for r in one.run(most=300).responses()]
    assert len(whole.tokens.ids) == 4 * 300
    assert whole.finish_reason == FINISH_REASON_LENGTH


async def test_wait_for_a_worker_begins_when_one_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For any time of prefill before; if it lasts, the caller gets an error."""
    worker = Worker()
    for module in (request_module, worker_calls):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: worker.now_s))
    monkeypatch.setattr(request_module, "_RETRY_PAUSE_S", 0.0)
    async with routed(worker) as one:
        worker.takes_s = [60.0]
        assert [len(said.tokens.ids) async for said in one.run(most=10).responses()] == [4 * 10]
        worker.takes_s = [60.0, 60.0, 60.0]
        with pytest.raises(Unavailable, match="gave way"):
            _ = [said async for said in one.run(most=10).responses()]
        assert len(worker.takes_s) == 1


async def test_prompt_that_is_prefilled_again_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that a decode worker refused before the fetch is released, not left until hold_s."""
    monkeypatch.setattr(worker_streams, "_RELEASE_TIMEOUT_S", 30.0)
    worker = Worker()
    async with routed(worker) as one:
        worker.refusals = 2
        assert [len(said.tokens.ids) async for said in one.run(most=100).responses()] == [4 * 100]
        await until(lambda: not worker.held)


async def test_prompt_of_a_caller_that_leaves_before_the_fetch_is_released() -> None:
    """Nobody will fetch it: prefill does not hold it until hold_s, nor wait for it in its drain."""
    worker = Worker()
    worker.freezes = "FetchKv"
    async with routed(worker) as one:
        leaving = asyncio.create_task(_ids_of(one.run(most=100)))
        await worker.frozen.wait()
        assert len(worker.held) == 1
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: not worker.held)


async def test_cancelled_caller_frees_every_resource() -> None:
    """At any moment, between any two steps of the event loop: every place is free again, and no
    worker counts as busy."""
    async with routed(Worker()) as one:

        async def sample() -> int:
            return sum([len(said.tokens.ids) async for said in one.run(most=100).responses()])

        assert await sample() == 4 * 100
        for steps in range(30):
            leaving = [asyncio.create_task(sample()) for _ in range(MIN_ADMITTED)]
            for _ in range(steps):
                await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            assert await one.running() == [0, 0]
        assert await sample() == 4 * 100


@pytest.mark.parametrize(
    ("rpc_name", "lost"), [("Prefill", "prefill"), ("FetchKv", "prefill"), ("Decode", "decode")]
)
async def test_lost_worker_ends_its_calls_at_once(rpc_name: str, lost: str) -> None:
    """A worker whose lease ended and that answers no ping: its calls move, also the decode that
    fetches from it, though its connection stays open and silent."""
    worker = Worker()
    async with routed(worker) as one:
        worker.freezes = rpc_name
        running = asyncio.create_task(_ids_of(one.run(most=200)))
        await worker.frozen.wait()
        one.silent.add(worker.address)
        one.lose(lost)
        async with asyncio.timeout(30):
            # A moved answer begins at 0 in this worker.
            assert len(await running) == 200
        assert await one.running() == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_no_engine_can_resume_is_resampled(stream: bool) -> None:
    """A worker is lost in the middle of an answer with penalties, and those that are left count
    them only from the first token. Unsent tokens are dropped, and the answer is whole; a caller
    that has tokens gets an error at once, which a retry cures."""
    able = Capabilities(
        engine="begins",
        roles=frozenset({"prefill", "decode"}),
        hand_offs=frozenset({"any"}),
        update="in_flight",
        draws="stream",
        penalties=True,
    )
    worker, resampled = Worker(), STARTED_OVER.labels("penalties")
    before = resampled._value.get()
    async with routed(worker, capabilities=able.encode()) as one:
        worker.freezes = "Decode"
        run = one.run(most=200, stream=stream, presence_penalty=0.5)
        running = asyncio.create_task(_ids_of(run))
        await worker.frozen.wait()
        one.silent.add(worker.address)
        one.lose("decode")
        async with asyncio.timeout(30):
            if stream:
                with pytest.raises(
                    Unavailable, match=r"begins cannot serve .*answered_tokens = \d+"
                ):
                    await running
            else:
                assert await running == list(range(200))
        assert await one.running() == [0, 0]
    assert resampled._value.get() == before + (not stream)


async def test_refused_ability_is_an_error_at_once_without_another_engine() -> None:
    """The engine declares each field and refuses them together: no second try there."""
    worker = Worker()
    worker.unsupported = "min_tokens beside a grammar"
    async with routed(worker) as one:
        with pytest.raises(UnsupportedByEngines, match=r"no worker can serve .* beside a grammar"):
            await _ids_of(one.run(most=9))
        assert worker.prefills == 1
        assert await one.running() == [0, 0]


async def test_drained_worker_keeps_its_calls() -> None:
    """It left discovery too, but answers: its requests end there."""
    worker = Worker()
    worker.portion = 1
    async with routed(worker) as one:
        answer = one.run(most=100, stream=True).responses()
        first = await anext(answer)
        one.lose("decode")
        rest = [said async for said in answer]
    ids = array("i", b"".join(said.tokens.ids for said in [first, *rest]))
    assert list(ids) == list(range(100))


async def _ids_of(run: Run) -> list[int]:
    said = [response async for response in run.responses()]
    return list(array("i", b"".join(response.tokens.ids for response in said)))
