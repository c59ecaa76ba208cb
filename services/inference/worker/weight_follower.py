"""Follows the weights announced in etcd: fetches, verifies and swaps them in.

The bytes come from a worker with the announced version, else from the worker above in a tree of all
workers, which relays them while it fetches, else from the trainer. After
`weight_silence_s` without data the next source continues at the first missing byte. On any failure
the old version stays in service; each new attempt fetches the newest announced version. A version
that the engine refuses is not fetched again. Keeps the bytes as published, since other workers
fetch them and check their digest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from forge.core.errors import DataLoss, ForgeError, NotFound, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.process.service import ServiceContext
from forge.runtime.rpc.streams import flowing
from forge.runtime.serving_groups import kind_in, starting_in
from forge.runtime.telemetry import log
from forge.runtime.weights import WeightManifest, digest_of, layout_of, manifest_key
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.engines.base import BrokenWeights, Engine, Probe, UnfitWeights
from services.inference.worker.appearance import Appearance
from services.inference.worker.metrics import (
    ANNOUNCED_VERSION,
    FETCH_FAILURES,
    REFUSED_VERSIONS,
    SOURCES_GIVEN_UP,
    WEIGHT_VERSION,
)
from services.inference.worker.weight_assembly import WeightAssembly
from services.inference.worker.weight_relay import WeightRelay
from services.inference.worker.weight_sources import WeightSources

_NAMED = 3
"""Failed sources in an error; the log has all."""
ERROR_KEY = "weights_error"
"""Metadata of a worker after a failed fetch (version, sources and reasons) or a refused version."""


class WeightFollower:
    """Keeps an engine at the newest weights announced."""

    def __init__(self, context: ServiceContext, engine: Engine, *, policy: str) -> None:
        self.weights: Mapping[int, Sequence[NamedTensor]] = {}
        """The version in service, as published; empty before the first."""
        self._context = context
        self._engine = engine
        self._key = manifest_key(policy)
        group = context.config.serving_group
        kinds = (kind_in(group, "prefill"), kind_in(group, "decode"), starting_in(group))
        self._peers = tuple(context.coordinator.discover(kind) for kind in kinds)
        self._appearance = Appearance(context, kind=starting_in(group))
        self._sources = WeightSources(self._peers, own_id=context.config.instance_id)
        self._silence_s: float = context.config.weight_silence_s
        self.relay = WeightRelay()
        """The version during its fetch."""
        self._wanted: WeightManifest | None = None
        self._assembly: WeightAssembly | None = None
        self._unmixed_version = 0
        """A version with a wrong digest; each source then begins at the first byte."""
        self._refused_version = 0
        """The newest version that the engine refused."""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._appearance.run())
            tasks.create_task(self._listen())
            tasks.create_task(self._keep_up())

    async def _listen(self) -> None:
        # Peers first: with an empty view it would fetch from the trainer.
        for peers in self._peers:
            await peers.known()
        await self._appearance.tried()
        async with aclosing(self._context.coordinator.follow(self._key)) as announced:
            async for value in announced:
                if value is None:
                    continue
                try:
                    self._wanted = WeightManifest.decode(value.value)
                except DataLoss as error:
                    log.error("weight_manifest_unreadable", key=self._key, error=str(error))
                    continue
                ANNOUNCED_VERSION.set(self._wanted.weight_version)
                self._news.set()

    async def _keep_up(self) -> None:
        backoff = Backoff(0.2, 10.0)
        while True:
            self._news.clear()
            manifest = self._wanted
            settled = max(self._refused_version, *self.weights, 0)
            if manifest is None or manifest.weight_version <= settled:
                await self._news.wait()
                continue
            try:
                await self._obtain(manifest)
                backoff.reset()
            except (BrokenWeights, UnfitWeights) as error:
                await self._refuse(manifest, error)
            except ForgeError as error:
                FETCH_FAILURES.inc()
                pause_s = backoff.next_s()
                log.warning(
                    "weights_not_obtained",
                    weight_version=manifest.weight_version,
                    retry_in_s=pause_s,
                    error=str(error),
                )
                await self._announce_error(f"version {manifest.weight_version}: {error}")
                # Newer weights end the wait.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), pause_s)

    async def _refuse(self, manifest: WeightManifest, error: ForgeError) -> None:
        """Stay with the version in service: the same bytes again would be refused again."""
        REFUSED_VERSIONS.inc()
        version = self._refused_version = manifest.weight_version
        kept = max(self.weights, default=0)
        log.error(
            "weights_refused", weight_version=version, in_service=kept or None, error=str(error)
        )
        stays = f"version {kept} stays in service" if kept else "none is in service"
        await self._announce_error(f"version {version} is refused, {stays}: {error}")

    async def _announce_error(self, text: str) -> None:
        if self._context.metadata.get(ERROR_KEY) != text:
            self._context.metadata[ERROR_KEY] = text
            await self._context.announce()

    async def _obtain(self, manifest: WeightManifest) -> None:
        began_s = time.monotonic()
        with self.relay.fetch():
            tensors, source = await self._fetch_from_any(manifest)
            fetched_s = time.monotonic()
            probe = _probe_of(manifest)
            await self._engine.load(tensors, version=manifest.weight_version, probe=probe)
            self.weights = {manifest.weight_version: tuple(tensors.values())}
        WEIGHT_VERSION.set(manifest.weight_version)
        log.info(
            "weights_swapped",
            weight_version=manifest.weight_version,
            step=manifest.step,
            source=source,
            fetch_s=round(fetched_s - began_s, 3),
            swap_s=round(time.monotonic() - fetched_s, 3),
        )
        self._context.metadata.pop(ERROR_KEY, None)
        self._context.metadata["weight_version"] = str(manifest.weight_version)
        self._context.set_ready()
        await self._context.announce()
        self._appearance.end()

    async def _fetch_from_any(self, manifest: WeightManifest) -> tuple[dict[str, NamedTensor], str]:
        """Return the tensors and the address of the source. Raises `Unavailable` when all sources
        have failed, or when one sent nothing and newer weights are announced."""
        failures = []
        for address in self._sources.of(manifest.weight_version, trainer=manifest.source):
            assembly = self._assembly_of(manifest)
            before_bytes = assembly.received_bytes
            try:
                await self._fetch(assembly, address)
                await asyncio.to_thread(_verify, manifest, assembly.tensors)
            except ForgeError as error:
                failures.append(f"{address}: {error}")
                self._give_up(address, manifest, error)
                if isinstance(error, DataLoss):
                    # The source of the wrong bytes is unknown: do not mix sources.
                    self._assembly, self._unmixed_version = None, manifest.weight_version
                progress = self._assembly is assembly and assembly.received_bytes > before_bytes
                if self._wanted is not manifest and not progress:
                    break
            else:
                self._assembly = None
                return assembly.tensors, address
        more = f"; and {len(failures) - _NAMED} more" if len(failures) > _NAMED else ""
        raise Unavailable("; ".join(failures[:_NAMED]) + more)

    def _give_up(self, address: str, manifest: WeightManifest, error: ForgeError) -> None:
        SOURCES_GIVEN_UP.inc()
        log.warning(
            "weight_source_given_up",
            source=address,
            weight_version=manifest.weight_version,
            error=str(error),
        )
        # NotFound: the source serves another version and is healthy.
        if not isinstance(error, NotFound):
            self._sources.avoid(address)

    async def _fetch(self, assembly: WeightAssembly, address: str) -> None:
        """Fetch the missing bytes into `assembly`."""
        stub = rpc.WeightServiceStub(self._context.channels.get(address))
        call: Any = stub.FetchWeights(assembly.request())
        try:
            async for response in flowing(call, silence_s=self._silence_s, source="the source"):
                before = len(assembly.tensors)
                assembly.add(response)
                if len(assembly.tensors) != before:
                    self.relay.progress()
                if assembly.complete:
                    return
        finally:
            call.cancel()

    def _assembly_of(self, manifest: WeightManifest) -> WeightAssembly:
        """Return the assembly of this version, with the data of earlier sources, or a new one."""
        version = manifest.weight_version
        kept = self._assembly is not None and self._assembly.version == version
        if self._assembly is None or not kept or version == self._unmixed_version:
            self._assembly = WeightAssembly(
                version, manifest.tensor_names, total_bytes=manifest.total_bytes
            )
        self.relay.show(self._assembly)
        return self._assembly


def _probe_of(manifest: WeightManifest) -> Probe | None:
    """Return the probe of a manifest, None without a usable one."""
    probe = manifest.probe
    if probe is None or len(probe.ids) < 2 or len(probe.logprobs) != len(probe.ids) - 1:
        return None
    return Probe(ids=tuple(probe.ids), logprobs=tuple(probe.logprobs))


def _verify(manifest: WeightManifest, tensors: dict[str, NamedTensor]) -> None:
    """Check names, order, types, shapes and digest. Raises DataLoss."""
    version = manifest.weight_version
    if list(tensors) != manifest.tensor_names:
        raise DataLoss(
            f"weights {version}: got {len(tensors)} tensors, not the "
            f"{len(manifest.tensor_names)} announced in their order"
        )
    if manifest.layout and layout_of(tensors.values()) != manifest.layout:
        raise DataLoss(f"weights {version}: types or shapes are not those announced")
    digest = digest_of(tensor.data for tensor in tensors.values())
    if digest != manifest.digest:
        raise DataLoss(f"weights {version}: sha256 {digest}, not {manifest.digest}")
