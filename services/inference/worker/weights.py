"""Follows the weights announced in etcd: fetches, verifies, has them swapped in, passes them on.

The manifest under weights/<policy>/latest says what is wanted. The bytes come from a worker that
serves that version already, else from the trainer. Whatever goes wrong, the old version stays in
service and the fetch is tried again. Owns the bytes as published, since only these match the digest
for the next one in the relay.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio
import msgspec

from forge.core.errors import DataLoss, ForgeError, Unavailable
from forge.runtime.coordination import Discovery
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.status import from_rpc_error
from forge.runtime.service import ServiceContext
from forge.runtime.telemetry import counter, gauge, log
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference import wire
from services.inference.engines.base import Engine, NamedTensor

_FETCH_TIMEOUT_S = 600.0
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0
_VERSION = gauge("forge_inference_weight_version", "Version of the weights in service.")
_FAILED = counter("forge_inference_weight_fetch_failures_total", "Weights that could not be had.")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """WeightManifest as announced: JSON in etcd."""

    weight_version: int
    step: int = 0
    tensor_names: list[str]
    total_bytes: int
    digest: str
    """sha256 over the tensors' data, in order, in hexadecimal."""
    source: str
    """The trainer that published it, host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """One whole version, as published."""

    version: int
    tensors: dict[str, NamedTensor]
    """In the manifest's order."""


class WeightFollower:
    """Keeps an engine at the newest weights announced."""

    def __init__(self, context: ServiceContext, engine: Engine, *, policy: str) -> None:
        self.held: HeldWeights | None = None
        self._context = context
        self._engine = engine
        self._key = f"weights/{policy}/latest"
        self._peers: tuple[Discovery, ...] = tuple(
            context.coordinator.discover(kind) for kind in ("prefill", "decode")
        )
        self._wanted: Manifest | None = None
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._keep_up())

    async def _listen(self) -> None:
        # Before any weights are: who does not know its peers asks the trainer.
        for peers in self._peers:
            await peers.known()
        async with aclosing(self._context.coordinator.follow(self._key)) as announced:
            async for value in announced:
                if value is None:
                    continue
                try:
                    self._wanted = msgspec.json.decode(value.value, type=Manifest)
                except msgspec.MsgspecError as error:
                    log.error("weight_manifest_unreadable", key=self._key, error=str(error))
                    continue
                self._news.set()

    async def _keep_up(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            self._news.clear()
            manifest = self._wanted
            if manifest is None or (self.held and manifest.weight_version <= self.held.version):
                await self._news.wait()
                continue
            try:
                await self._obtain(manifest)
                backoff_s = _FIRST_BACKOFF_S
            except ForgeError as error:
                _FAILED.inc()
                log.warning(
                    "weights_not_obtained",
                    weight_version=manifest.weight_version,
                    retry_in_s=backoff_s,
                    error=str(error),
                )
                # Newer weights end the wait: they may be easier to get.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _obtain(self, manifest: Manifest) -> None:
        began_s = time.monotonic()
        tensors, source = await self._fetch_from_any(manifest)
        fetched_s = time.monotonic()
        await self._engine.load(tensors, version=manifest.weight_version)
        self.held = HeldWeights(version=manifest.weight_version, tensors=tensors)
        _VERSION.set(manifest.weight_version)
        log.info(
            "weights_swapped",
            weight_version=manifest.weight_version,
            step=manifest.step,
            source=source,
            fetch_s=round(fetched_s - began_s, 3),
            swap_s=round(time.monotonic() - fetched_s, 3),
        )
        self._context.metadata["weight_version"] = str(manifest.weight_version)
        self._context.set_ready()
        await self._context.announce()

    async def _fetch_from_any(self, manifest: Manifest) -> tuple[dict[str, NamedTensor], str]:
        """From a worker that has them, which spares the trainer; at last from the trainer."""
        failures = []
        for address in self._sources(manifest):
            try:
                tensors = await self._fetch(manifest, address)
                await asyncio.to_thread(_verify, manifest, tensors)
            except ForgeError as error:
                failures.append(f"{address}: {error}")
            else:
                return tensors, address
        raise Unavailable("; ".join(failures))

    def _sources(self, manifest: Manifest) -> Iterator[str]:
        version, own_id = str(manifest.weight_version), self._context.config.instance_id
        having = [
            peer.address
            for discovery in self._peers
            for peer in discovery.instances
            if peer.metadata.get("weight_version") == version and peer.instance_id != own_id
        ]
        random.shuffle(having)
        yield from having
        yield manifest.source

    async def _fetch(self, manifest: Manifest, address: str) -> dict[str, NamedTensor]:
        stub = rpc.WeightServiceStub(self._context.channels.get(address))
        tensors: dict[str, NamedTensor] = {}
        # A message is a tensor: a sender cannot make us keep more than what was announced.
        joiner = Joiner(max_bytes=manifest.total_bytes + (1 << 20))
        call: Any = stub.FetchWeights(
            pb.FetchWeightsRequest(weight_version=manifest.weight_version),
            timeout=_FETCH_TIMEOUT_S,
        )
        try:
            async for response in call:
                whole = joiner.add(response.tensor)
                if whole is not None:
                    tensor = wire.read_tensor(whole)
                    tensors[tensor.name] = tensor
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        return tensors


def _verify(manifest: Manifest, tensors: dict[str, NamedTensor]) -> None:
    """Exactly what was announced, bit for bit. Raises DataLoss."""
    version = manifest.weight_version
    if list(tensors) != manifest.tensor_names:
        raise DataLoss(
            f"weights {version}: got {len(tensors)} tensors, not the "
            f"{len(manifest.tensor_names)} announced in their order"
        )
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.data)
    if digest.hexdigest() != manifest.digest:
        raise DataLoss(f"weights {version}: sha256 {digest.hexdigest()}, not {manifest.digest}")
