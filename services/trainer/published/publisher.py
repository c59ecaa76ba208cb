"""Publication of weights: versions are held here, announced in etcd and fetched by workers.

If ranks hold segments of a version, it is announced once each of them has confirmed that it serves
its segment. Owns the version counter. Versions only increase: after a publication whose result is
unknown, its number is not used again. During a hold the newest version is announced all the same,
and workers wait with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from forge.core.errors import FailedPrecondition, StaleFence, Unavailable
from forge.core.named_tensor import HubParts, NamedTensor
from forge.runtime.telemetry import log
from forge.runtime.weights import (
    HeldWeights,
    TensorEntry,
    WeightAnnouncement,
    WeightManifest,
    WeightProbe,
    manifest_key,
)
from services.trainer.metrics import WEIGHT_SEGMENTS, WEIGHT_VERSION
from services.trainer.published.files import VersionNumber
from services.trainer.published.local_copies import LocalCopies, Rest
from services.trainer.published.segments import OtherRanks, segments_of
from services.trainer.published.versions import PublishedVersion, PublishedVersions

_KEY = manifest_key()


class Superseded(FailedPrecondition):
    """Another trainer publishes in this cluster; the older trainer stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The weights after one optimizer step, copied."""

    step: int
    tensors: Sequence[NamedTensor]
    probe: WeightProbe | None = None
    """Outputs of these weights, for engines to compare with."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further names of tied tensors, by the name of the tensor."""
    hub: HubParts | None = None
    """As in the manifest."""
    others: OtherRanks | None = None
    """The ranks that have the tensors after these; None: these are all."""
    number: int = 0
    """Number of the copy that these ranks have."""

    def entries(self) -> tuple[TensorEntry, ...]:
        """Describes the tensors; reads all data for the digests."""
        return tuple(
            TensorEntry.of(tensor, aliases=self.aliases.get(tensor.name, ()))
            for tensor in self.tensors
        )


class Register(Protocol):
    """The operations of the coordinator that a publisher uses."""

    async def get(self, key: str) -> Any:
        """The value with its revision, or None. Raises `Unavailable`."""

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        """The new revision. Raises `StaleFence`, `Unavailable`."""


class Publisher:
    """Announces versions, which workers then fetch from `versions`."""

    def __init__(
        self,
        register: Register,
        versions: PublishedVersions,
        *,
        source: str,
        floor: int,
        copies: LocalCopies | None = None,
        number: VersionNumber | None = None,
    ) -> None:
        """`source` is this trainer's address; `floor` the highest version that may be in use;
        `copies` writes versions to files, too; `number` is on the trainer's disk."""
        self._register = register
        self._versions = versions
        self._source = source
        self._floor = max(floor, number.highest()) if number is not None else floor
        self._number = number
        self._copies = copies
        self.version = 0
        """Newest version announced for certain; 0 before the first."""
        self._uncertain: WeightAnnouncement | None = None
        """A held version whose announcement failed, and may be in etcd nevertheless."""

    @property
    def next_version(self) -> int:
        """The number of the next publication, once there was one: no other trainer counts."""
        return self._floor + 1

    async def publish(self, snapshot: Snapshot) -> int:
        """Announce `snapshot` as the next version and return that version.

        Raises `Unavailable` when etcd does not answer or the announcement changed meanwhile: retry,
        with newer weights if there are any.
        Raises `Superseded` when another trainer publishes in this cluster, `DataLoss` when the
        value in etcd is not a manifest.
        """
        current = await self._register.get(_KEY)
        announced = WeightAnnouncement.decode(current.value) if current is not None else None
        if self.version and announced is not None and announced.source != self._source:
            raise Superseded(
                f"another trainer, at {announced.source}, published version "
                f"{announced.weight_version}: one cluster has one trainer"
            )
        self._settle(announced)
        version = max(self._floor, announced.weight_version if announced else 0) + 1
        self._floor = version
        announcement = self._uncertain = await self._prepare(snapshot, version)
        try:
            await self._register.compare_and_swap(
                _KEY,
                announcement.encode(),
                expected_revision=current.mod_revision if current is not None else 0,
            )
        except StaleFence as error:
            # Perhaps an earlier announcement of this trainer that arrived late: the next
            # publication reads whose it is.
            raise Unavailable(f"the announcement changed before version {version}") from error
        self.version, self._uncertain = version, None
        self._record(announcement)
        await self._keep(snapshot.others)
        return version

    def _record(self, announced: WeightAnnouncement) -> None:
        version, segments = announced.weight_version, len(announced.segments)
        self._versions.announced(
            PublishedVersion(announcement=announced, published_unix_s=time.time())
        )
        WEIGHT_VERSION.set(version)
        WEIGHT_SEGMENTS.set(segments)
        log.info(
            "weights_published", weight_version=version, step=announced.step, segments=segments
        )

    def _settle(self, announced: WeightAnnouncement | None) -> None:
        """Keep the version of the last, failed publication if etcd has it; otherwise drop it: no
        worker will fetch it, and an announced version needs its place."""
        last, self._uncertain = self._uncertain, None
        if last is None:
            return
        if announced is not None and announced.encode() == last.encode():
            self._record(last)
        else:
            self._versions.withdraw(last.weight_version)

    async def _prepare(self, snapshot: Snapshot, version: int) -> WeightAnnouncement:
        """Hold the snapshot as a version, before it is announced: workers fetch as soon as they
        observe it. Raises `Unavailable` when a rank is lost."""
        await self._note(version)
        own = await asyncio.to_thread(snapshot.entries)
        others = snapshot.others
        found = await others.described(snapshot.number) if others is not None else ()
        manifest = WeightManifest(
            weight_version=version,
            step=snapshot.step,
            tensors=(*own, *(entry for one in found for entry in one.entries)),
            probe=snapshot.probe,
            hub=snapshot.hub,
        )
        encoded = await asyncio.to_thread(manifest.encode)
        announcement = WeightAnnouncement.of(
            manifest,
            encoded,
            source=self._source,
            segments=segments_of(len(own), self._source, found) if others is not None else (),
        )
        rest = None
        if others is not None:
            await others.serve(snapshot.number, version)
            self._versions.join(others)
            places = [one.place for one in found]
            sizes = [one.size_bytes for one in manifest.tensors]
            rest = Rest(ranks=others, places=places, sizes=sizes)
        tensors = snapshot.tensors
        if self._copies is not None:
            tensors, ways = await self._copies.put(version, announcement.manifest, tensors, rest)
            announcement = msgspec.structs.replace(announcement, ways=ways)
        segment = range(len(own)) if others is not None else None
        self._versions.add(version, HeldWeights(tensors=tensors, manifest=encoded, segment=segment))
        return announcement

    async def _note(self, version: int) -> None:
        if self._number is None:
            return
        try:
            await asyncio.to_thread(self._number.raise_to, version)
        except OSError as error:
            # etcd, workers and checkpoints know the number, too.
            log.warning("weight_version_not_noted", weight_version=version, error=str(error))

    async def _keep(self, others: OtherRanks | None) -> None:
        """Drop the versions that are no longer held."""
        if self._copies is not None:
            self._copies.keep(self._versions.weights.keys())
        if others is None:
            return
        try:
            await others.keep(self._versions.divided)
        except Unavailable as error:
            # The version is announced; the next one repeats this.
            log.warning("segments_not_dropped", error=str(error))
