"""A prefill and a decode engine joined by their real servicers over a real socket, and passes of
prefill that run only when a test lets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest import mock

import numpy as np

from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SamplingParams
from services.inference import codec
from services.inference.engines.base import PrefillEngine
from services.inference.engines.embedded.prefill import PrefillActor
from services.inference.worker.service import DecodeServicer, PrefillServicer
from tests.contract.engines import GREEDY, Answer, Pair, make_prompt
from tests.support.inference.weight_sources import SECURITY
from tests.support.runtime.waiting import settle, until

_LONG_S = 60.0


class Passes:
    """Passes of all prefill actors, which wait until they are let run."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self._free = threading.Event()
        self._begun = threading.Event()

    def let(self, passes: int) -> None:
        """Lets so many run."""
        self._allowed.release(passes)

    def free(self) -> None:
        """Lets all run from now on."""
        self._free.set()
        self._allowed.release()

    async def begun(self) -> None:
        """Returns once a pass waits."""
        await until(self._begun.is_set)

    def wait(self) -> None:
        self._begun.set()
        if not self._free.is_set():
            assert self._allowed.acquire(timeout=_LONG_S), "no pass was let run"


@contextmanager
def held_passes() -> Iterator[Passes]:
    """Around a test with an engine that has started."""
    passes, plain = Passes(), PrefillActor._pass

    def wait(actor: PrefillActor) -> None:
        if actor._pending:
            passes.wait()
        plain(actor)

    with mock.patch.object(PrefillActor, "_pass", wait):
        try:
            yield passes
        finally:
            passes.free()


@asynccontextmanager
async def arriving_at_once(engine: PrefillEngine) -> AsyncIterator[None]:
    """The prompts of the block reach an embedded engine together: until its end the engine computes
    another one."""
    other = make_prompt([1], GREEDY)
    with held_passes() as passes:
        reading = asyncio.create_task(engine.prefill(other, hold_s=_LONG_S))
        await passes.begun()
        yield
        await settle()
        passes.free()
        await reading
    engine.release(other.request_id)


Damage = Callable[[pb.FetchKvResponse], None]


class Sender(PrefillServicer):
    """The real one; notes and, if a test says so, changes what it sends."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.sent: list[pb.FetchKvResponse] = []
        """With keys and values."""
        self.damage: Damage | None = None
        self._arrived = asyncio.Condition()

    async def FetchKv(
        self, request: pb.FetchKvRequest, context: Any
    ) -> AsyncIterator[pb.FetchKvResponse]:
        async for response in super().FetchKv(request, context):
            if self.damage is not None:
                self.damage(response)
            if response.HasField("slice"):
                self.sent.append(response)
                async with self._arrived:
                    self._arrived.notify_all()
            yield response

    async def has_sent(self, blocks: int) -> None:
        """Returns once so many blocks were sent."""
        async with self._arrived, asyncio.timeout(_LONG_S):
            await self._arrived.wait_for(lambda: len(self.sent) >= blocks)


@dataclass(kw_only=True)
class Joined:
    """Both workers."""

    pair: Pair
    sender: Sender
    decode: DecodeServicer
    address: str
    _numbers: Iterator[int] = field(default_factory=count)

    def request(self, ids: list[int], *, most: int = 16) -> pb.PrefillRequest:
        """A greedy request of its own."""
        return pb.PrefillRequest(
            request_id=f"early-{next(self._numbers)}",
            prompt_ids=np.asarray(ids, dtype="<i4").tobytes(),
            sampling=SamplingParams(max_tokens=most, temperature=0.0),
            hold_s=60,
        )

    async def prefill(self, request: pb.PrefillRequest) -> Answer:
        """Returns its first token."""
        read = await self.sender.Prefill(request, None)
        answer = Answer(cached_tokens=read.cached_tokens)
        answer.add(codec.read_tokens(read.first))
        return answer

    async def decode_early(self, request: pb.PrefillRequest) -> Answer:
        """Returns all tokens but the first."""
        answer = Answer()
        decode = pb.DecodeRequest(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            prefill_address=self.address,
            early=True,
        )
        async for response in self.decode.Decode(decode, None):
            answer.add(codec.read_tokens(response.tokens))
            answer.fetched_tokens = response.fetched_tokens
        return answer

    async def sample(self, ids: list[int], *, most: int = 16) -> Answer:
        """Prefill and decode at the same time, as a router runs them."""
        request = self.request(ids, most=most)
        first, rest = await asyncio.gather(self.prefill(request), self.decode_early(request))
        first.ids += rest.ids
        first.versions += rest.versions
        first.fetched_tokens = rest.fetched_tokens
        return first


@asynccontextmanager
async def joined(pair: Pair, *, landing_bytes: int = 1 << 30) -> AsyncIterator[Joined]:
    """Serves the prefill engine on a socket, without shared memory."""
    sender = Sender(pair.prefill)
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(
        rpc.add_PrefillServiceServicer_to_server, sender, full_name="forge.v1.PrefillService"
    )
    channels = Channels(SECURITY)
    decode = DecodeServicer(pair.decode, channels, silence_s=60.0, landing_bytes=landing_bytes)
    decode.fetcher.shared_memory = ""
    address = await server.start()
    try:
        yield Joined(pair=pair, sender=sender, decode=decode, address=address)
    finally:
        await channels.close()
        await server.stop(grace_s=0)
