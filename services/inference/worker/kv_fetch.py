"""The fetch of a prompt's keys and values by a decode worker: from its own engine, or from another
worker, whole or while they are computed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

from forge.core.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    Unavailable,
)
from forge.runtime.files.host_memory import place
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.streams import flowing
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference import kv_codec
from services.inference.engines.base import (
    DecodeEngine,
    EarlyDecodeEngine,
    KvSpan,
    OtherWeights,
    PrefillEngine,
)
from services.inference.engines.byte_room import ByteRoom
from services.inference.engines.capabilities import EARLY_HAND_OFF
from services.inference.engines.refusals import refused
from services.inference.worker import shared_memory
from services.inference.worker.landing_memory import Landing
from services.inference.worker.metrics import HAND_OFFS, LANDING_BYTES

UNSHARED_S = 60.0
"""Time without shared memory after a file that could not be opened or mapped."""


class KvFetcher:
    """The fetches of one decode worker."""

    def __init__(
        self,
        engine: DecodeEngine,
        channels: Channels,
        *,
        silence_s: float,
        landing_bytes: int,
        local: PrefillEngine | None,
    ) -> None:
        """`local`: this process's own engine of the role prefill, if it has one."""
        self.channels = channels
        self.silence_s = silence_s
        self.local = local
        self.room = ByteRoom(landing_bytes, on_change=LANDING_BYTES.inc)
        self.whole_room = ByteRoom(landing_bytes, on_change=LANDING_BYTES.inc)
        """Apart: a computed prompt does not wait for those that are still computed."""
        self.shared_memory = place()
        self.clock = time.monotonic
        self._unshared_until_s = -math.inf
        self._engine = engine

    def fetch(self, request: pb.DecodeRequest, *, to_token: int) -> KvFetch:
        """Return the fetch of one request; `to_token`: length of its prompt."""
        return KvFetch(self, request, to_token=to_token)

    def offered_memory(self) -> str:
        """Return the memory that senders may use now; "" for none."""
        return self.shared_memory if self.clock() >= self._unshared_until_s else ""

    def pause_memory(self) -> None:
        """Offer no memory for a while: the next fetches do without it."""
        self._unshared_until_s = self.clock() + UNSHARED_S

    @property
    def fingerprint(self) -> bytes:
        """Names the engine's model; empty: unknown."""
        if EARLY_HAND_OFF not in self._engine.capabilities.hand_offs:
            return b""
        return cast(EarlyDecodeEngine, self._engine).kv_fingerprint

    @property
    def records_experts(self) -> bool:
        """Whether the engine keeps the experts of the prompts that it gets."""
        return self._engine.capabilities.routed_experts

    @property
    def version(self) -> int:
        """Version of the cached prefixes: caches are emptied at each swap."""
        return self._engine.status().version


class KvFetch:
    """The fetch of one request: a `FetchKv`."""

    def __init__(self, fetcher: KvFetcher, request: pb.DecodeRequest, *, to_token: int) -> None:
        self._fetcher = fetcher
        self._request = request
        self._to_token = to_token
        self.tokens = 0
        """Data from another worker."""
        self.seconds = 0.0
        """Time that it took; of an early hand-off the time of its last block."""

    async def __call__(self, from_token: int) -> KvSpan:
        """Fetch the keys and values from a token on. Raises OtherWeights, RefusedHandOff for
        damaged ones, Unavailable when the prefill worker is silent, NotFound when it has none."""
        local = self._fetcher.local
        if local is not None and not self._request.early:
            try:
                fetch = getattr(local, "local_kv", local.fetch_kv)
                held: KvSpan = await fetch(self._request.request_id, from_token=from_token)
                if from_token and held.version != self._fetcher.version:
                    # Other prompts of new weights have been cached since the read of this one.
                    raise OtherWeights(f"the prompt is of weights {held.version}, its prefix not")
                local.release(self._request.request_id)
                return held
            except NotFound:
                if self._request.prefill:
                    raise
        address = self._request.prefill_address
        try:
            async with aclosing(self._spans(address, from_token)) as spans:
                span = await self._joined(spans, from_token)
        except DeadlineExceeded as error:
            raise Unavailable(str(error)) from error
        except FailedPrecondition as error:
            if from_token:
                raise OtherWeights(f"hand-off from {address}: {error}") from error
            raise refused("model", f"hand-off from {address}: {error}") from error
        except DataLoss as error:
            raise refused("damaged", f"hand-off from {address}: {error}") from error
        if span is None:
            raise Unavailable(f"{address} ended its stream before the last keys and values")
        HAND_OFFS.labels("early" if self._request.early else "whole").inc()
        self.tokens = span.tokens
        return span

    async def _joined(
        self, spans: AsyncIterator[tuple[KvSpan, float]], from_token: int
    ) -> KvSpan | None:
        """Join the blocks of an early hand-off; another one is a single block."""
        landing = Landing(self._fetcher.room, from_token=from_token, to_token=self._to_token)
        try:
            async for span, began_s in spans:
                whole = await landing.add(span) if self._request.early else span
                if whole is not None:
                    self.seconds = time.monotonic() - began_s
                    return whole
        finally:
            landing.close()
        return None

    async def _spans(
        self, address: str, from_token: int
    ) -> AsyncGenerator[tuple[KvSpan, float], None]:
        """Yield the blocks with the time when each began to arrive."""
        fetcher, request = self._fetcher, self._request
        stub = fetcher.channels.stub(rpc.PrefillServiceStub, address)
        assembler, asked_s = kv_codec.SpanAssembler(), time.monotonic()
        began_s: float | None = None
        arriving_bytes = 0
        memory = AsyncExitStack()
        call: Any = stub.FetchKv(
            pb.FetchKvRequest(
                request_id=request.request_id,
                from_token=from_token,
                release=True,
                slices=True,
                shared_memory=fetcher.offered_memory(),
                session_id=request.session_id,
                early=request.early,
                model_fingerprint=fetcher.fingerprint,
                prefix_version=fetcher.version if from_token else 0,
                experts=fetcher.records_experts,
            )
        )
        try:
            async for response in flowing(
                call, silence_s=fetcher.silence_s, source=f"prefill instance {address}"
            ):
                if request.early and _is_empty(response):
                    continue
                if began_s is None:
                    began_s = time.monotonic() if request.early else asked_s
                arrives = not request.early and not arriving_bytes
                if arrives and (arriving_bytes := kv_codec.kv_bytes(response)):
                    await memory.enter_async_context(fetcher.whole_room.taken(arriving_bytes))
                span: KvSpan | None
                if response.HasField("shared"):
                    span = await self._read_shared(response, assembler.take_end())
                else:
                    span = assembler.add(response)
                if span is not None:
                    yield span, began_s
                    began_s = None
        finally:
            call.cancel()
            await memory.aclose()

    async def _read_shared(self, response: pb.FetchKvResponse, end: kv_codec.PromptEnd) -> KvSpan:
        """Map a span in shared memory; `end` came before it. Raises DataLoss, Unavailable if it
        cannot be opened."""
        shared = response.shared
        try:
            data = await asyncio.to_thread(
                shared_memory.read, shared.name, size=shared.bytes, checksum=shared.xxh3_64
            )
        except OSError as error:
            self._fetcher.pause_memory()
            raise Unavailable(f"shared memory {shared.name}: {error}") from error
        except asyncio.CancelledError:
            # The thread may not have begun.
            shared_memory.remove(shared.name)
            raise
        return kv_codec.read_shared_span(response, data, end)


def _is_empty(response: pb.FetchKvResponse) -> bool:
    return not any(response.HasField(field) for field in ("block", "slice", "shared"))
