"""`WeightService`: sends the manifest and the tensors of a version, held here or still arriving."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from forge.core.errors import FailedPrecondition, InvalidArgument, NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc import tensors as codec
from forge.runtime.rpc.chunks import chunked, split
from forge.runtime.weights.bulk import BulkServer
from forge.runtime.weights.held import HeldWeights
from forge.runtime.weights.manifest import SLICE_BYTES
from forge.v1.common_pb2 import TensorSlice
from forge.v1.inference_pb2 import (
    FetchManifestRequest,
    FetchManifestResponse,
    FetchWeightsRequest,
    FetchWeightsResponse,
    JoinGroupRequest,
    JoinGroupResponse,
)
from forge.v1.inference_pb2_grpc import WeightServiceServicer

if TYPE_CHECKING:
    from forge.runtime.weights.delta import DeltaEncoder

FULL_NAME = "forge.v1.WeightService"
GROUP_PARTS = 1024
"""Most slices of one message."""
BULK_BYTES = 4 * SLICE_BYTES
"""Most data of one `TensorSlice` that follows on a bulk connection; each MiB has its digest."""
_MESSAGE_SLICES = 16
_MESSAGE_BYTES = _MESSAGE_SLICES * SLICE_BYTES
"""Most data of one message that follows. A message costs as much CPU time as some MiB of data."""
_LEAST_BULK_BYTES = 16 << 10
"""Smaller slices are cheaper in the message."""


class Part(NamedTuple):
    """One slice of a tensor, or of its delta."""

    tensor: NamedTensor
    start: int
    data: memoryview
    whole_bytes: int
    base_version: int = 0
    """Base version of a delta."""


class Message(NamedTuple):
    """A response of FetchWeights."""

    response: FetchWeightsResponse
    bulk: Sequence[memoryview] = ()
    """The data of its slices without data, for the bulk connection."""


class Arriving(Protocol):
    """A version that this process fetches itself."""

    def fetches(self, version: int) -> bool:
        """Whether this version is fetched here now."""

    async def manifest(self, version: int) -> bytes:
        """Return the encoded manifest once it has arrived. Raises `NotFound`."""

    def parts(
        self,
        version: int,
        from_tensor: int,
        from_byte: int,
        *,
        base_version: int,
        most_bytes: int,
    ) -> AsyncIterator[list[Part]]:
        """Yield slices from a byte of a tensor on, as they arrive, each up to `BULK_BYTES`, at most
        `most_bytes` together; deltas against `base_version` where there are any. Raises
        `NotFound`."""


class WeightServicer(WeightServiceServicer):
    """Sends the weights that this process holds."""

    def __init__(
        self,
        held: Callable[[], Mapping[int, HeldWeights]],
        *,
        arriving: Arriving | None = None,
        deltas: DeltaEncoder | None = None,
        bulk: BulkServer | None = None,
        join: Callable[[int, str], Awaitable[JoinGroupResponse]] | None = None,
        sent: Callable[[int], object] = lambda sent_bytes: None,
    ) -> None:
        """`held` returns each version held; `arriving` has one that this process fetches. Without
        `deltas` it sends those that have arrived, without `bulk` all data over gRPC. `join`
        returns the place of an instance in the group of a version. `sent` observes the bytes of
        each message."""
        self._held = held
        self._arriving = arriving
        self._deltas = deltas
        self._bulk = bulk
        self._join = join
        self._sent = sent

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
        """Sends the tensors of one version, or of a segment of it. Raises `NotFound`, and
        `FailedPrecondition` for a segment that the caller does not expect."""
        offers = self._bulk is not None and request.bulk and request.groups
        stream = self._bulk.stream() if offers else None  # type: ignore[union-attr]
        request.bulk = False
        async with stream or nullcontext():
            if stream is not None:
                yield FetchWeightsResponse(bulk=stream.offer)
                request.bulk = await stream.connected()
            async for response, data in self._weights(request):
                self._sent(response.ByteSize() + sum(map(len, data)))
                yield response
                if stream is not None and data:
                    await stream.send(data)

    async def JoinGroup(  # noqa: N802 - named by the proto
        self, request: JoinGroupRequest, context: Any
    ) -> JoinGroupResponse:
        """Returns the caller's place in the group of a version. Raises `FailedPrecondition`."""
        if self._join is None:
            raise FailedPrecondition("no groups form here: weight_group.backend is off")
        return await self._join(request.weight_version, request.instance_id)

    async def _weights(self, request: FetchWeightsRequest) -> AsyncIterator[Message]:
        version = request.weight_version
        if self._arriving is not None and request.slices and self._arrives(version):
            arriving = self._arriving.parts(
                version,
                request.from_tensor,
                request.from_byte,
                base_version=request.base_version if request.groups else 0,
                most_bytes=_MESSAGE_BYTES if request.bulk else SLICE_BYTES,
            )
            async for group in arriving:
                for message in _responses(request, _grouped(request, group)):
                    yield message
            return
        held = self._version(version)
        if held.segment is not None:
            _require_segment(request, held.segment)
        if request.groups and request.base_version:
            async for message in self._with_deltas(request, held):
                yield message
            return
        async for message in _messages(request, held):
            yield message

    async def _with_deltas(
        self, request: FetchWeightsRequest, held: HeldWeights
    ) -> AsyncIterator[Message]:
        # Both versions stay, however long the call lasts.
        versions = {**self._held(), request.weight_version: held}
        group: list[Part] = []
        first = request.from_tensor - held.first
        for run in _delta_runs(held.tensors, first):
            deltas = await self._deltas_of(versions, request, [at + held.first for at in run])
            for at, delta in zip(run, deltas, strict=True):
                tensor, from_byte = held.tensors[at], request.from_byte if at == first else 0
                if delta is None or from_byte:
                    group += parts_of([tensor], 0, from_byte, slice_bytes=_most_bytes(request))
                else:
                    group += delta_parts(tensor, delta, request.base_version)
            *whole, group = _grouped(request, group)
            for message in _responses(request, whole):
                yield message
        for message in _responses(request, [group] if group else ()):
            yield message

    async def _deltas_of(
        self,
        versions: Mapping[int, HeldWeights],
        request: FetchWeightsRequest,
        numbers: Sequence[int],
    ) -> Sequence[bytes | None]:
        held, base_version = versions[request.weight_version], request.base_version
        if held.deltas.base_version == base_version:
            names = [held.tensors[number - held.first].name for number in numbers]
            return [held.deltas.by_name.get(name) for name in names]
        if self._deltas is None or base_version not in versions:
            return [None] * len(numbers)
        return await self._deltas.of(versions, base_version, request.weight_version, numbers)

    def _arrives(self, version: int) -> bool:
        if self._arriving is None or version in (held := self._held()):
            return False
        # An older one returns after a rollback.
        return version > max(held, default=0) or self._arriving.fetches(version)

    def _version(self, version: int) -> HeldWeights:
        held = self._held()
        if version not in held:
            versions = sorted(held) or "no weights"
            raise NotFound(f"weight_version {version} is not held here; held: {versions}")
        return held[version]


def _require_segment(request: FetchWeightsRequest, segment: range) -> None:
    version = request.weight_version
    if not request.segments:
        raise FailedPrecondition(
            f"weights {version} are sent by several ranks of the trainer, which this caller does "
            "not know: upgrade workers first, or set publish_from = rank_0 at the trainer"
        )
    if request.from_tensor not in segment:
        raise NotFound(
            f"tensor {request.from_tensor} of weights {version} is not sent here: this rank sends "
            f"{len(segment)} tensors from {segment.start} on"
        )


async def _messages(request: FetchWeightsRequest, held: HeldWeights) -> AsyncIterator[Message]:
    """Raises `FailedPrecondition` when the caller takes no slices and a tensor needs them."""
    tensors = held.tensors
    if request.slices:
        most_bytes, at = _most_bytes(request), request.from_tensor - held.first
        parts = parts_of(tensors, at, request.from_byte, slice_bytes=most_bytes)
        for message in _responses(request, _grouped(request, parts)):
            yield message
        return
    for tensor in tensors:
        codec.require_serializable(tensor)
    for tensor in tensors:
        for chunk in split(await asyncio.to_thread(codec.serialize, tensor)):
            yield Message(FetchWeightsResponse(tensor=chunk))


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
            yield Part(tensor, start, view[start : start + slice_bytes], view.nbytes)
        from_byte = 0


def delta_parts(
    tensor: NamedTensor, delta: bytes, base_version: int, *, from_byte: int = 0
) -> Iterator[Part]:
    """Yield the slices of a tensor's delta, at least one."""
    view = memoryview(delta)
    for start in range(from_byte, max(view.nbytes, from_byte + 1), SLICE_BYTES):
        yield Part(tensor, start, view[start : start + SLICE_BYTES], view.nbytes, base_version)


def _delta_runs(tensors: Sequence[NamedTensor], first: int) -> Iterator[list[int]]:
    """Yield the positions of tensors from `first` on, those together whose deltas are made at
    once."""
    return chunked(
        range(first, len(tensors)),
        size_of=lambda at: len(tensors[at].data),
        max_items=GROUP_PARTS,
        max_bytes=_MESSAGE_BYTES,
    )


def _grouped(request: FetchWeightsRequest, parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield groups with at most `SLICE_BYTES` in the message: many small tensors in one."""
    return chunked(
        parts,
        size_of=lambda part: len(part.data) * (1 if _follows(request, part) else _MESSAGE_SLICES),
        max_items=GROUP_PARTS,
        max_bytes=_MESSAGE_BYTES,
    )


def _most_bytes(request: FetchWeightsRequest) -> int:
    return BULK_BYTES if request.bulk else SLICE_BYTES


def _follows(request: FetchWeightsRequest, part: Part) -> bool:
    """Whether the data of a part follows on the bulk connection."""
    return request.bulk and not part.base_version and len(part.data) >= _LEAST_BULK_BYTES


def _responses(request: FetchWeightsRequest, groups: Iterable[list[Part]]) -> Iterator[Message]:
    for group in groups:
        if request.groups:
            yield _group_message(request, group)
            continue
        for part in group:
            data = bytes(part.data)
            piece = TensorSlice(**_fields(part), data=data, xxh3_64=xxh3_64_intdigest(data))
            yield Message(FetchWeightsResponse(slice=piece))


def _group_message(request: FetchWeightsRequest, group: Sequence[Part]) -> Message:
    """One message; the caller has the digests of the manifest."""
    response, follows = FetchWeightsResponse(), []
    for part in group:
        # In place: a message in an argument is copied.
        piece = response.slices.add(**_fields(part))
        if _follows(request, part):
            piece.bulk_bytes = len(part.data)
            follows.append(part.data)
        else:
            piece.data = bytes(part.data)
    return Message(response, follows)


def _fields(part: Part) -> dict[str, Any]:
    tensor = part.tensor
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "whole_bytes": part.whole_bytes,
        "offset_bytes": part.start,
        "base_version": part.base_version,
    }
