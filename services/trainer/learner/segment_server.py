"""A rank above 0 that holds and sends its segment of each version.

Owns the rank's gRPC server and the orders of rank 0 (`segment_orders`), on a thread of their own,
so that weights are sent while the rank computes. The rank's own thread hands over copies.

    copied -> described (digests) -> served -> dropped

The rank confirms each transition. A copy that is not served when the next one is made is dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from forge.core.errors import ForgeError, NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.files import host_memory
from forge.runtime.process.credential_reload import reload_credentials
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.telemetry import log
from forge.runtime.weights import FULL_NAME, HeldWeights, TensorEntry, WeightServicer
from forge.runtime.weights.bulk import BulkServer
from forge.runtime.weights.delta import DeltaEncoder
from forge.runtime.weights.version_files import starts_of, write_segment
from forge.v1 import inference_pb2_grpc as rpc
from services.trainer.config import TrainerConfig
from services.trainer.learner.segment_orders import (
    LOOK_S,
    Describe,
    Keep,
    SegmentAnswer,
    SegmentOrder,
    Serve,
    Write,
    answer_key,
    order_key,
)
from services.trainer.model.placement import local_rank
from services.trainer.published.segments import RankSegment

_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCopy:
    """A copy of one rank's segment of the published tensors."""

    tensors: Sequence[NamedTensor]
    segment: range
    """Numbers of the tensors among all published ones."""
    sizes: Sequence[int]
    """Bytes of all published tensors."""
    aliases: Mapping[str, Sequence[str]]
    """Further names of tied tensors, by the name of the tensor."""


class SegmentServer:
    """The server of one rank."""

    def __init__(self, store: Store, config: TrainerConfig, *, rank: int) -> None:
        """Listens at the trainer's port plus the number of the rank on its host. Raises
        `ConfigError` for wrong TLS or key files, and for a port in use."""
        self._store = store
        self._rank = rank
        self._host = config.advertise_host or config.host
        self._copies: dict[int, SegmentCopy] = {}
        """By number, not served yet."""
        self._served: dict[int, SegmentCopy] = {}
        self._held: Mapping[int, HeldWeights] = {}
        """By version, like the one above."""
        self._sent_bytes = 0
        self._address = ""
        self._security = Security.from_config(config)
        port = config.port and config.port + local_rank(rank)
        self._server = RpcServer(
            service="trainer", host=config.host, port=port, security=self._security
        )
        self._bulk = BulkServer(
            self._security, config.bulk, host=config.host, rank=local_rank(rank)
        )
        self._loop = asyncio.new_event_loop()
        self._copied = asyncio.Event()
        self._stopped = asyncio.Event()
        listening: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._run(listening)),
            name="segments",
            daemon=True,
        )
        self._thread.start()
        listening.result()

    def hold(self, number: int, copy: SegmentCopy) -> None:
        """Hold a copy, and drop earlier ones that are not served."""
        self._loop.call_soon_threadsafe(self._hold, number, copy)

    def stop(self) -> None:
        """Stop listening."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_END_S)

    def _hold(self, number: int, copy: SegmentCopy) -> None:
        self._copies = {number: copy}
        self._copied.set()

    async def _run(self, listening: Future[None]) -> None:
        servicer = WeightServicer(
            lambda: self._held, deltas=DeltaEncoder(), bulk=self._bulk, sent=self._count
        )
        self._server.add_service(
            rpc.add_WeightServiceServicer_to_server, servicer, full_name=FULL_NAME
        )
        try:
            port = (await self._server.start()).rpartition(":")[2]
        except BaseException as error:
            listening.set_exception(error)
            return
        self._address = f"{self._host}:{port}"
        self._server.set_serving(True)
        log.info("segments_served", rank=self._rank, address=self._address)
        listening.set_result(None)
        reload = asyncio.create_task(reload_credentials(self._security))
        orders = asyncio.create_task(self._obey())
        await self._stopped.wait()
        await cancel_and_wait(orders, reload)
        await self._server.stop(grace_s=0)
        self._bulk.close()

    def _count(self, sent_bytes: int) -> None:
        self._sent_bytes += sent_bytes

    async def _obey(self) -> None:
        number = 1
        try:
            while True:
                if not self._store.check([order_key(number)]):
                    await asyncio.sleep(LOOK_S)
                    continue
                order = msgspec.json.decode(self._store.get(order_key(number)), type=SegmentOrder)
                answer = msgspec.json.encode(await self._answer(order)).decode()
                self._store.set(answer_key(number, self._rank), answer)
                number += 1
        except RuntimeError as error:
            # The store ends with rank 0, and this process with both.
            log.warning("segment_orders_ended", rank=self._rank, error=str(error))

    async def _answer(self, order: SegmentOrder) -> SegmentAnswer:
        segment, error = None, ""
        try:
            match order:
                case Describe(number=number):
                    segment = await self._describe(number)
                case Serve(number=number, version=version):
                    self._show({**self._served, version: self._copies.pop(number)})
                case Keep(versions=versions):
                    kept = {one: self._served[one] for one in versions if one in self._served}
                    self._show(kept)
                case Write():
                    await self._write(order)
        except Exception as failure:  # without an answer rank 0 would wait forever
            said = isinstance(failure, ForgeError | OSError)
            error = f"rank {self._rank}: {failure if said else repr(failure)}"
        return SegmentAnswer(error=error, segment=segment, sent_bytes=self._sent_bytes)

    async def _describe(self, number: int) -> RankSegment:
        # This rank may still copy.
        while number not in self._copies:
            self._copied.clear()
            await self._copied.wait()
        copy = self._copies[number]
        entries = await asyncio.to_thread(
            lambda: tuple(
                TensorEntry.of(one, aliases=copy.aliases.get(one.name, ())) for one in copy.tensors
            )
        )
        return RankSegment(entries=entries, source=self._address, place=host_memory.place())

    async def _write(self, order: Write) -> None:
        copy = self._served.get(order.version)
        if copy is None:
            raise NotFound(f"weight version {order.version} is not held here")
        starts = starts_of(copy.sizes, aligned_bytes=order.aligned_bytes)
        tensors = await asyncio.to_thread(
            write_segment,
            Path(order.path),
            copy.tensors,
            starts[copy.segment.start : copy.segment.stop],
            mapped=order.mapped,
        )
        if order.version in self._served:
            self._show({**self._served, order.version: replace(copy, tensors=tensors)})

    def _show(self, served: dict[int, SegmentCopy]) -> None:
        self._served = served
        self._held = {
            version: HeldWeights(tensors=copy.tensors, segment=copy.segment)
            for version, copy in served.items()
        }
