"""`WeightService`: sends the manifest and the tensors of a version, held here or still arriving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from forge.core.errors import InvalidArgument, NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc import tensors as codec
from forge.runtime.rpc.chunks import split
from forge.runtime.weights.manifest import SLICE_BYTES
from forge.v1.common_pb2 import TensorSlice
from forge.v1.inference_pb2 import (
    FetchManifestRequest,
    FetchManifestResponse,
    FetchWeightsRequest,
    FetchWeightsResponse,
)
from forge.v1.inference_pb2_grpc import WeightServiceServicer

FULL_NAME = "forge.v1.WeightService"
GROUP_PARTS = 1024
"""Most slices of one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """One complete version."""

    tensors: Sequence[NamedTensor]
    """In the manifest's order."""
    manifest: bytes = b""
    """As encoded by its trainer; b"" by a trainer of an earlier release."""


class Part(NamedTuple):
    """One slice of a tensor."""

    tensor: NamedTensor
    start: int
    data: memoryview


class Arriving(Protocol):
    """A version that this process fetches itself."""

    async def manifest(self, version: int) -> bytes:
        """Return the encoded manifest once it has arrived. Raises `NotFound`."""

    def parts(self, version: int, from_tensor: int, from_byte: int) -> AsyncIterator[list[Part]]:
        """Yield slices from a byte of a tensor on, as they arrive, at most `SLICE_BYTES` together.
        Raises `NotFound`."""


class WeightServicer(WeightServiceServicer):
    """Sends the weights that this process holds."""

    def __init__(
        self,
        held: Callable[[], Mapping[int, HeldWeights]],
        *,
        arriving: Arriving | None = None,
    ) -> None:
        """`held` returns each version held; `arriving` has one that this process fetches."""
        self._held = held
        self._arriving = arriving

    async def FetchManifest(  # noqa: N802 - named by the proto
        self, request: FetchManifestRequest, context: Any
    ) -> AsyncIterator[FetchManifestResponse]:
        """Sends the manifest of one version. Raises `NotFound`."""
        version = request.weight_version
        if self._arrives(version):
            encoded = await self._arriving.manifest(version)  # type: ignore[union-attr]
        else:
            encoded = self._version(version).manifest
        if not encoded:
            raise NotFound(f"weight_version {version} has no manifest here")
        for chunk in split(encoded):
            yield FetchManifestResponse(chunk=chunk)

    async def FetchWeights(  # noqa: N802 - named by the proto
        self, request: FetchWeightsRequest, context: Any
    ) -> AsyncIterator[FetchWeightsResponse]:
        """Sends the tensors of one version. Raises `NotFound`."""
        version = request.weight_version
        if self._arriving is not None and request.slices and self._arrives(version):
            arriving = self._arriving.parts(version, request.from_tensor, request.from_byte)
            async for group in arriving:
                for response in _responses(request, [group]):
                    yield response
            return
        async for response in weight_responses(request, self._version(version).tensors):
            yield response

    def _arrives(self, version: int) -> bool:
        return self._arriving is not None and version > max(self._held(), default=0)

    def _version(self, version: int) -> HeldWeights:
        held = self._held()
        if version not in held:
            versions = sorted(held) or "no weights"
            raise NotFound(f"weight_version {version} is not held here; held: {versions}")
        return held[version]


async def weight_responses(
    request: FetchWeightsRequest,
    tensors: Sequence[NamedTensor],
    *,
    slice_bytes: int = SLICE_BYTES,
) -> AsyncIterator[FetchWeightsResponse]:
    """The responses of FetchWeights that send these tensors in the manifest's order.

    Raises `FailedPrecondition` when the caller takes no slices and a tensor needs them,
    `InvalidArgument` for a start position beyond the end.
    """
    if request.slices:
        parts = parts_of(tensors, request.from_tensor, request.from_byte, slice_bytes=slice_bytes)
        for response in _responses(request, _grouped(parts)):
            yield response
        return
    for tensor in tensors:
        codec.require_serializable(tensor)
    for tensor in tensors:
        for chunk in split(await asyncio.to_thread(codec.serialize, tensor)):
            yield FetchWeightsResponse(tensor=chunk)


def parts_of(
    tensors: Sequence[NamedTensor],
    from_tensor: int,
    from_byte: int,
    *,
    slice_bytes: int = SLICE_BYTES,
) -> Iterator[Part]:
    """Yield the slices from a byte of a tensor on; at least one a tensor. Raises
    `InvalidArgument`."""
    rest = tensors[from_tensor:]
    if from_byte and (not rest or from_byte >= len(rest[0].data)):
        raise InvalidArgument(f"from_byte = {from_byte}: beyond the end of tensor {from_tensor}")
    for tensor in rest:
        view = memoryview(tensor.data)
        for start in range(from_byte, max(view.nbytes, from_byte + 1), slice_bytes):
            yield Part(tensor, start, view[start : start + slice_bytes])
        from_byte = 0


def _grouped(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield groups of at most `SLICE_BYTES`: many small tensors in one message."""
    group: list[Part] = []
    group_bytes = 0
    for part in parts:
        if group and (group_bytes + len(part.data) > SLICE_BYTES or len(group) == GROUP_PARTS):
            yield group
            group, group_bytes = [], 0
        group.append(part)
        group_bytes += len(part.data)
    if group:
        yield group


def _responses(
    request: FetchWeightsRequest, groups: Iterable[list[Part]]
) -> Iterator[FetchWeightsResponse]:
    for group in groups:
        if request.groups:
            # The caller has the digests of the manifest.
            yield FetchWeightsResponse(slices=[_slice(part) for part in group])
            continue
        for part in group:
            piece = _slice(part)
            piece.xxh3_64 = xxh3_64_intdigest(piece.data)
            yield FetchWeightsResponse(slice=piece)


def _slice(part: Part) -> TensorSlice:
    tensor = part.tensor
    return TensorSlice(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        whole_bytes=len(tensor.data),
        offset_bytes=part.start,
        data=bytes(part.data),
    )
