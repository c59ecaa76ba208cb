"""A held version that this host's disk lacks, from a worker that serves it.

For a standby of another host that takes over during a hold: the files of the hold are on the host
of the earlier trainer. Owns the fetch and its checks; `files` stores the version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from xxhash import xxh3_64_digest

from forge.core.errors import DataLoss, ForgeError, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.runtime.coordination import Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.streams import flowing
from forge.runtime.rpc.tensors import SliceAssembler
from forge.runtime.telemetry import log
from forge.runtime.weights import (
    SLICE_BYTES,
    HeldWeights,
    TensorEntry,
    WeightAnnouncement,
    WeightManifest,
)
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc

SILENCE_S = 15.0
MAX_MANIFEST_BYTES = 1 << 30


class ServedVersions:
    """Fetches versions from the workers that serve them."""

    def __init__(self, channels: Channels, *, silence_s: float = SILENCE_S) -> None:
        """After `silence_s` without data it tries the next worker."""
        self._channels = channels
        self._silence_s = silence_s

    async def fetch(
        self, announced: WeightAnnouncement, workers: Sequence[Instance]
    ) -> HeldWeights:
        """Return the verified version. Raises `Unavailable` if no worker sends it."""
        version = announced.weight_version
        serving = [one for one in workers if one.metadata.get("weight_version") == str(version)]
        for worker in serving:
            try:
                return await self._fetch_from(worker.address, announced)
            except ForgeError as error:
                log.warning(
                    "weight_source_given_up",
                    source=worker.address,
                    weight_version=version,
                    error=str(error),
                )
        raise Unavailable(f"none of {len(serving)} workers with weights {version} sent them")

    async def _fetch_from(self, address: str, announced: WeightAnnouncement) -> HeldWeights:
        encoded = await self._manifest(address, announced.weight_version)
        manifest = announced.open(encoded)
        tensors: list[NamedTensor] = []
        slices = SliceAssembler()
        request = pb.FetchWeightsRequest(
            weight_version=announced.weight_version, slices=True, groups=True
        )
        stub = rpc.WeightServiceStub(self._channels.get(address))
        async with self._flowing(stub.FetchWeights(request)) as responses:
            async for response in responses:
                for piece in response.slices:
                    entry = _expected(manifest, len(tensors), piece)
                    # Each access to the field copies it.
                    data = piece.data
                    _check(entry, piece.offset_bytes, data)
                    tensor = slices.add_data(piece, data, max_bytes=entry.size_bytes)
                    if tensor is not None:
                        tensors.append(tensor)
        if len(tensors) != len(manifest.tensors):
            raise Unavailable(f"{address} ended its stream after {len(tensors)} tensors")
        return HeldWeights(tensors=tuple(tensors), manifest=encoded)

    async def _manifest(self, address: str, version: int) -> bytes:
        joiner = Joiner(max_bytes=MAX_MANIFEST_BYTES)
        stub = rpc.WeightServiceStub(self._channels.get(address))
        request = pb.FetchManifestRequest(weight_version=version)
        async with self._flowing(stub.FetchManifest(request)) as responses:
            async for response in responses:
                whole = joiner.add(response.chunk)
                if whole is not None:
                    return whole
        raise Unavailable(f"{address} ended its stream within the manifest")

    @asynccontextmanager
    async def _flowing(self, call: Any) -> AsyncIterator[AsyncIterator[Any]]:
        try:
            yield flowing(call, silence_s=self._silence_s, source="the worker")
        finally:
            call.cancel()


def _expected(manifest: WeightManifest, number: int, piece: Any) -> TensorEntry:
    """Raises `DataLoss` for a slice of another tensor."""
    if number == len(manifest.tensors):
        raise DataLoss(f"{piece.name}: no tensor is expected after {number}")
    entry = manifest.tensors[number]
    found = (piece.name, piece.dtype, tuple(piece.shape), piece.whole_bytes)
    if found != (entry.name, entry.dtype, entry.shape, entry.size_bytes):
        raise DataLoss(f"{entry.name}: the worker sent {found}")
    return entry


def _check(entry: TensorEntry, start: int, data: bytes) -> None:
    """Raises `DataLoss` for a slice with another digest than announced."""
    number, odd = divmod(start, SLICE_BYTES)
    if odd or xxh3_64_digest(data) != entry.digest(number):
        raise DataLoss(f"{entry.name}: the slice at {start} is damaged")
