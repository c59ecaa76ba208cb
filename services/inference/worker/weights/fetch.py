"""The fetch of one announced version, from one source after the other.

Owns manifest and data. After a time without data, a cut stream or a damaged slice, the next source
continues at the first missing slice. If the ranks of the trainer send
segments, each is fetched from its rank, in the manifest's order. Not here: which version to fetch
(`follower`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from forge.core.errors import DataLoss, ForgeError, NotFound, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.telemetry import log
from forge.runtime.weights import (
    HeldWeights,
    TensorDeltas,
    TensorEntry,
    WeightAnnouncement,
    WeightManifest,
    WeightProbe,
    digest_of,
    layout_of,
)
from forge.runtime.weights.assembly import DamagedDelta, WeightAssembly
from forge.runtime.weights.client import WeightClient
from forge.runtime.weights.segments import owner_of
from services.inference.worker.metrics import (
    REFUSED_DELTAS,
    SOURCES_GIVEN_UP,
    VERSIONS,
    WIRE_BYTES,
)
from services.inference.worker.weights.group import GroupMember
from services.inference.worker.weights.local_weights import LocalWeights
from services.inference.worker.weights.relay import WeightRelay
from services.inference.worker.weights.sources import WeightSources

_NAMED = 3
"""Failed sources in an error; the log has all."""


class Interrupted(Exception):
    """A fetch gave way to newer weights."""


class WeightFetch:
    """One version, from its announcement to complete and verified data; may be tried again."""

    def __init__(
        self,
        announced: WeightAnnouncement,
        *,
        sources: WeightSources,
        client: WeightClient,
        relay: WeightRelay,
        local: LocalWeights | None,
        group: GroupMember | None = None,
        served: Mapping[int, HeldWeights],
        is_overtaken: Callable[[], bool],
    ) -> None:
        """`local`: files that may have the version; `group`: receives it with others. `served`: the
        version in service, the base of deltas. `is_overtaken`: newer weights are announced; then it
        ends at a source without data."""
        self.announced = announced
        self.probe: WeightProbe | None = announced.probe
        """Known once the manifest is here."""
        self.source = ""
        """Address of the source that sent the last data."""
        self.way = "grpc"
        """`memory` or `directory` if a file had the version, `group` if a group received it, `bulk`
        if TCP sent data of it."""
        self.wire_bytes = 0
        """Data that was sent for the complete version."""
        self._kept = False
        self._interrupted = False
        self._asked = ""
        """Address of the newest call."""
        self._sources = sources
        self._client = client
        self._relay = relay
        self._local = local
        self._group = group
        self._in_group = False
        self._served = served
        self._is_overtaken = is_overtaken
        self._encoded = b""
        self.manifest: WeightManifest | None = None
        """None before it is here, and by a trainer that sends none."""
        self._assembly: WeightAssembly | None = None
        self._unmixed = False
        """After a wrong digest without digests of slices: each source begins at the first byte."""

    @property
    def received_bytes(self) -> int:
        """Data received so far."""
        return self._assembly.received_bytes if self._assembly is not None else 0

    def begin(self) -> None:
        """Start an attempt, which may be interrupted."""
        self._kept = self._interrupted = False

    def keep(self) -> None:
        """Finish this attempt also if it is overtaken: an engine loads the first tensors. Raises
        `Interrupted` if it has given way before."""
        if self._interrupted:
            raise Interrupted(f"version {self.announced.weight_version} is overtaken")
        self._kept = True

    def interrupt(self) -> None:
        """Give way to newer weights unless it is kept, or a group receives it: each member would
        lose it. Raises `Interrupted`."""
        if not self._kept and not self._in_group:
            self._interrupted = True
            raise Interrupted(f"version {self.announced.weight_version} is overtaken")

    @property
    def entries(self) -> Sequence[TensorEntry]:
        """All tensors, in the order of their arrival; empty before the manifest, and without
        one."""
        return self.manifest.tensors if self.manifest is not None else ()

    @property
    def assembled(self) -> bool:
        """Whether data may arrive."""
        return self._assembly is not None

    def arrived(self, name: str) -> NamedTensor | None:
        """Return a tensor that is complete and verified."""
        return self._assembly.tensors.get(name) if self._assembly is not None else None

    async def run(self) -> HeldWeights:
        """Return the complete version. Raises `Unavailable` with sources and reasons when all have
        failed; a further run continues."""
        version, failures = self.announced.weight_version, []
        for address in self._sources.of(version, trainer=self.announced.source):
            before_bytes, self._asked = self.received_bytes, address
            try:
                assembly = await self._begun(address)
                await self._read_file(assembly)
                await self._receive_in_group(assembly)
                if not assembly.complete:
                    await self._receive_from(assembly, address)
                if self.manifest is None:
                    await asyncio.to_thread(_verify, self.announced, assembly.tensors)
            except ForgeError as error:
                failures.append(f"{self._asked}: {error}")
                self._give_up(self._asked, error)
                if isinstance(error, DamagedDelta):
                    REFUSED_DELTAS.inc()
                    assembly.refuse_deltas()
                if isinstance(error, DataLoss) and self.manifest is None:
                    # The source of the wrong bytes is unknown: do not mix sources.
                    self._assembly, self._unmixed = None, True
                overtaken = self._is_overtaken() and not self._kept
                if self.received_bytes <= before_bytes and overtaken:
                    break
            else:
                self.source = address
                return self._complete(assembly)
        more = f"; and {len(failures) - _NAMED} more" if len(failures) > _NAMED else ""
        raise Unavailable("; ".join(failures[:_NAMED]) + more)

    def _complete(self, assembly: WeightAssembly) -> HeldWeights:
        self.wire_bytes = assembly.wire_bytes
        if self.way == "grpc" and assembly.bulk_bytes:
            self.way = "bulk"
        WIRE_BYTES.inc(assembly.wire_bytes)
        VERSIONS.labels(self.way).inc()
        tensors = tuple(assembly.tensors.values())
        if self.manifest is not None:
            tensors = tuple(self.manifest.with_hub_names(tensors))
        return HeldWeights(
            tensors=tensors,
            manifest=self._encoded,
            deltas=TensorDeltas(base_version=assembly.base_version, by_name=assembly.deltas),
        )

    def _give_up(self, address: str, error: ForgeError) -> None:
        SOURCES_GIVEN_UP.inc()
        log.warning(
            "weight_source_given_up",
            source=address,
            weight_version=self.announced.weight_version,
            error=str(error),
        )
        # NotFound: the source serves another version and is healthy.
        if not isinstance(error, NotFound):
            self._sources.avoid(address)

    async def _begun(self, address: str) -> WeightAssembly:
        """Return the assembly, with the data of earlier sources, or a new one."""
        announced = self.announced
        if announced.manifest and self.manifest is None:
            self._encoded = await self._client.manifest(address, announced.weight_version)
            self.manifest = await asyncio.to_thread(announced.open, self._encoded)
            self.probe = self.manifest.probe
        if self._assembly is None or self._unmixed:
            entries = self.entries
            names = [one.name for one in entries] or list(announced.tensor_names or ())
            total_bytes = sum(one.size_bytes for one in entries) or announced.total_bytes
            self._assembly = WeightAssembly(
                announced.weight_version,
                names,
                total_bytes=total_bytes,
                entries=entries,
                base_version=max(self._served, default=0),
                base={one.name: one for held in self._served.values() for one in held.tensors},
            )
        self._relay.show(self._assembly, self._encoded)
        return self._assembly

    async def _read_file(self, assembly: WeightAssembly) -> None:
        """Take the version from a file, if there is one; once, since a refused file stays so."""
        local, self._local = self._local, None
        if local is None or self.manifest is None or assembly.complete:
            return
        found = await local.read(self.announced, self.manifest)
        if found is not None:
            tensors, self.way = found
            assembly.adopt(tensors)
            self._relay.progress()

    async def _receive_in_group(self, assembly: WeightAssembly) -> None:
        """Receive the version with other workers, if a group forms; once."""
        group, self._group = self._group, None
        if group is None or assembly.received_bytes or assembly.complete:
            return
        self._in_group = True
        try:
            if await group.receive(self.announced, self.entries, assembly, self._relay.progress):
                self.way = "group"
        finally:
            self._in_group = False

    async def _receive_from(self, assembly: WeightAssembly, address: str) -> None:
        """Fetch the missing bytes; from the trainer, each segment from its rank."""
        segments, tensors = self.announced.segments, len(assembly.names)
        if address != self.announced.source or not segments:
            await self._receive(assembly, address, until=tensors)
            return
        while not assembly.complete:
            owner, end = owner_of(segments, len(assembly.tensors), tensors=tensors)
            await self._receive(assembly, owner, until=end)

    async def _receive(self, assembly: WeightAssembly, address: str, *, until: int) -> None:
        self._asked = address
        await self._client.fetch(assembly, address, until=until, progress=self._relay.progress)


def _verify(announced: WeightAnnouncement, tensors: dict[str, NamedTensor]) -> None:
    """Check the announcement of a trainer of an earlier release. Raises DataLoss."""
    version = announced.weight_version
    if announced.layout and layout_of(tensors.values()) != announced.layout:
        raise DataLoss(f"weights {version}: types or shapes are not those announced")
    digest = digest_of(tensor.data for tensor in tensors.values())
    if digest != announced.digest:
        raise DataLoss(f"weights {version}: sha256 {digest}, not {announced.digest}")
