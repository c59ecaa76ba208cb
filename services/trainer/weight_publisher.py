"""Published weights: immutable copies, served in chunks, announced in etcd.

Owns the version counter and the copies of the last versions. Versions only ever rise: a
publication whose outcome is unknown is never repeated under the same number.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forge.core.errors import FailedPrecondition, NotFound, StaleFence
from forge.runtime.rpc.tensors import weight_responses
from forge.runtime.telemetry import log
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.trainer.metrics import WEIGHT_VERSION

KEPT = 2
"""Versions held: the latest, and the one that workers may still be fetching."""
KEY = "weights/default/latest"


class Superseded(FailedPrecondition):
    """Another trainer publishes in this cluster: the older of the two must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One tensor as it travels."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    """Little-endian, C order; of a copy that nothing changes any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The weights after one optimizer step."""

    step: int
    tensors: Sequence[NamedTensor]

    @property
    def total_bytes(self) -> int:
        """Of the tensors' data."""
        return sum(tensor.data.nbytes for tensor in self.tensors)

    def digest(self) -> str:
        """sha256 over the tensors' data, in order."""
        digest = hashlib.sha256()
        for tensor in self.tensors:
            digest.update(tensor.data)
        return digest.hexdigest()


class Register(Protocol):
    """What a publisher needs of the coordinator."""

    async def get(self, key: str) -> Any:
        """The value with its revision, or None. Raises `Unavailable`."""

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        """Raises `StaleFence`, `Unavailable`."""


class Publisher:
    """Announces versions and holds what it announced."""

    def __init__(self, register: Register, *, source: str, floor: int) -> None:
        """`source` is this trainer's address; `floor` the highest version known to be used."""
        self._register = register
        self._source = source
        self._floor = floor
        self._held: dict[int, Snapshot] = {}
        self.version = 0
        """Newest version known to be announced; 0 before the first."""

    async def publish(self, snapshot: Snapshot) -> int:
        """Announce `snapshot` as the next version and return that version.

        Raises `Unavailable` when etcd does not answer: try again, with newer weights if there
        are; `Superseded` when another trainer publishes in this cluster.
        """
        current = await self._register.get(KEY)
        announced = json.loads(current.value) if current is not None else {}
        if self.version and announced.get("source") not in (None, self._source):
            raise Superseded(
                f"another trainer, at {announced['source']}, published version "
                f"{announced['weight_version']}: one cluster has one trainer"
            )
        version = max(self._floor, int(announced.get("weight_version", 0))) + 1
        self._floor = version
        manifest = await asyncio.to_thread(self._manifest, version, snapshot)
        # Held before it is announced: workers ask for it the moment they hear of it.
        self._held[version] = snapshot
        try:
            await self._register.compare_and_swap(
                KEY,
                manifest,
                expected_revision=current.mod_revision if current is not None else 0,
            )
        except StaleFence as error:
            raise Superseded(
                f"another trainer published while version {version} was on its way: one cluster "
                "has one trainer"
            ) from error
        self.version = version
        for old in sorted(self._held)[:-KEPT]:
            del self._held[old]
        WEIGHT_VERSION.set(version)
        log.info("weights_published", weight_version=version, step=snapshot.step)
        return version

    def _manifest(self, version: int, snapshot: Snapshot) -> bytes:
        """WeightManifest as JSON, with numbers as numbers."""
        fields = {
            "weight_version": version,
            "step": snapshot.step,
            "tensor_names": [tensor.name for tensor in snapshot.tensors],
            "total_bytes": snapshot.total_bytes,
            "digest": snapshot.digest(),
            "source": self._source,
        }
        return json.dumps(fields).encode()

    def held(self, version: int) -> Snapshot:
        """The weights of a version. Raises `NotFound`."""
        if version not in self._held:
            raise NotFound(f"weight_version {version} is not held here; held: {sorted(self._held)}")
        return self._held[version]


class WeightServicer(rpc.WeightServiceServicer):
    """Serves what the publisher holds."""

    def __init__(self) -> None:
        self.publisher: Publisher | None = None
        """Set once there is something to serve."""

    async def FetchWeights(  # noqa: N802 - named by the proto
        self, request: pb.FetchWeightsRequest, context: Any
    ) -> AsyncIterator[pb.FetchWeightsResponse]:
        if self.publisher is None:
            raise NotFound("no weights have been published yet")
        snapshot = self.publisher.held(request.weight_version)
        async for response in weight_responses(request, snapshot.tensors):
            yield response
