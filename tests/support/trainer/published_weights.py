"""Publication of weights without etcd: the register, and a fetch as a worker makes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from forge.core.errors import StaleFence, Unavailable
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.weights import WeightServicer, manifest_key
from forge.v1 import common_pb2, inference_pb2
from services.trainer.weight_publisher import Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    value: bytes
    mod_revision: int


class FakeRegister:
    """etcd's compare-and-swap, with outages on demand."""

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.lose_answer = False
        self.away = False

    async def get(self, key: str) -> Entry | None:
        assert key == manifest_key()
        if self.away:
            raise Unavailable("etcd is away")
        return self.entry

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        revision = self.entry.mod_revision if self.entry else 0
        if revision != expected_revision:
            raise StaleFence("somebody was faster")
        self.entry = Entry(value=value, mod_revision=revision + 1)
        if self.lose_answer:
            raise Unavailable("the answer was lost")
        return revision + 1

    @property
    def manifest(self) -> dict[str, Any]:
        assert self.entry is not None
        manifest: dict[str, Any] = json.loads(self.entry.value)
        return manifest


async def fetch(publisher: Publisher, version: int) -> list[common_pb2.Tensor]:
    """The tensors of a version, in the order sent."""
    joiner = Joiner()
    request = inference_pb2.FetchWeightsRequest(weight_version=version)
    return [
        common_pb2.Tensor.FromString(whole)
        async for response in WeightServicer(lambda: publisher.held).FetchWeights(request, None)
        if (whole := joiner.add(response.tensor)) is not None
    ]
