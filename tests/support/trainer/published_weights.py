"""Publication of weights without etcd: the register, and a fetch as a worker makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.core.errors import StaleFence, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.weights import HeldWeights, WeightServicer, manifest_key
from forge.v1 import common_pb2, inference_pb2
from services.trainer.weight_publisher import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    value: bytes
    mod_revision: int


class FakeRegister:
    """etcd's compare-and-swap, with outages on demand."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.lose_answer = False
        self.away = False

    async def get(self, key: str) -> Entry | None:
        if self.away:
            raise Unavailable("etcd is away")
        return self.entries.get(key)

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        if self.away:
            raise Unavailable("etcd is away")
        entry = self.entries.get(key)
        revision = entry.mod_revision if entry else 0
        if revision != expected_revision:
            raise StaleFence("somebody was faster")
        self.entries[key] = Entry(value=value, mod_revision=revision + 1)
        if self.lose_answer:
            raise Unavailable("the answer was lost")
        return revision + 1

    @property
    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self.entries[manifest_key()].value)
        return manifest


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
