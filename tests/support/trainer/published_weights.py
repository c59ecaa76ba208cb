"""Publication of weights without etcd: the register, and a fetch as a worker makes it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from forge.core.errors import StaleFence, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.server import RpcServer
from forge.runtime.weights import FULL_NAME, HeldWeights, WeightServicer, manifest_key
from forge.runtime.weights.delta import DeltaEncoder
from forge.v1 import common_pb2, inference_pb2
from forge.v1 import inference_pb2_grpc as rpc
from services.trainer.published.publisher import Publisher, Snapshot
from services.trainer.published.versions import PublishedVersions
from tests.support.inference.weight_sources import SECURITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    value: bytes
    mod_revision: int


class FakeRegister:
    """etcd's compare-and-swap, with outages on demand."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.announced: list[tuple[int, bytes]] = []
        """Each version that workers could read, with its announcement."""
        self.lose_answer = False
        self.away = False
        self.delay = False
        """The answer is lost, and the swap waits for `arrive`."""
        self._delayed: list[tuple[str, bytes, int]] = []

    async def arrive(self) -> None:
        """Make the delayed swaps whose revision is still the present one."""
        delayed, self._delayed = self._delayed, []
        for key, value, revision in delayed:
            with suppress(StaleFence):
                await self._swap(key, value, revision)

    async def get(self, key: str) -> Entry | None:
        if self.away:
            raise Unavailable("etcd is away")
        return self.entries.get(key)

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        if self.away:
            raise Unavailable("etcd is away")
        if self.delay:
            self._delayed.append((key, value, expected_revision))
            raise Unavailable("the answer was lost")
        revision = await self._swap(key, value, expected_revision)
        if self.lose_answer:
            raise Unavailable("the answer was lost")
        return revision

    async def _swap(self, key: str, value: bytes, expected_revision: int) -> int:
        entry = self.entries.get(key)
        revision = entry.mod_revision if entry else 0
        if revision != expected_revision:
            raise StaleFence("somebody was faster")
        self.entries[key] = Entry(value=value, mod_revision=revision + 1)
        if key == manifest_key():
            self.announced.append((self.manifest["weight_version"], value))
        return revision + 1

    @property
    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self.entries[manifest_key()].value)
        return manifest


@asynccontextmanager
async def serving_publisher(
    register: FakeRegister,
) -> AsyncIterator[tuple[Publisher, PublishedVersions]]:
    """A publisher whose versions a real server sends."""
    versions = PublishedVersions(kept=2)
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)
    servicer = WeightServicer(lambda: versions.weights, deltas=DeltaEncoder())
    server.add_service(rpc.add_WeightServiceServicer_to_server, servicer, full_name=FULL_NAME)
    source = await server.start()
    yield Publisher(register, versions, source=source, floor=0), versions
    await server.stop(grace_s=0)


def snapshot(step: int) -> Snapshot:
    """Four bytes, the first of them the step."""
    data = memoryview(bytes([step, 1, 2, 3]))
    tensor = NamedTensor(name="w", dtype="float32", shape=(1,), data=data)
    return Snapshot(step=step, tensors=[tensor])


async def fetch(held: Mapping[int, HeldWeights], version: int) -> list[common_pb2.Tensor]:
    """The tensors of a version, in the order sent."""
    joiner = Joiner()
    request = inference_pb2.FetchWeightsRequest(weight_version=version)
    return [
        common_pb2.Tensor.FromString(whole)
        async for response in WeightServicer(lambda: held).FetchWeights(request, None)
        if (whole := joiner.add(response.tensor)) is not None
    ]
