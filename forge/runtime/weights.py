"""The format in which a trainer publishes weights and workers fetch them.

A manifest in etcd names the newest version; `WeightService` sends the tensors of a version. Owns
the manifest, its key and the RPC; each service owns the tensors it holds.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from forge.core.errors import DataLoss, InvalidArgument, NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc import tensors as codec
from forge.runtime.rpc.chunks import CHUNK_BYTES, split
from forge.v1.inference_pb2 import FetchWeightsRequest, FetchWeightsResponse
from forge.v1.inference_pb2_grpc import WeightServiceServicer

FULL_NAME = "forge.v1.WeightService"
DEFAULT_POLICY = "default"
TRAINER_STANDBYS = f"trainer/{DEFAULT_POLICY}/standby/"
"""Prefix of the etcd keys of trainers that wait for their election."""


def manifest_key(policy: str = DEFAULT_POLICY) -> str:
    """The etcd key of the newest manifest of a policy."""
    return f"weights/{policy}/latest"


def digest_of(tensors: Iterable[bytes | memoryview]) -> str:
    """sha256 over the data of tensors, in order, in hexadecimal."""
    digest = hashlib.sha256()
    for data in tensors:
        digest.update(data)
    return digest.hexdigest()


def layout_of(tensors: Iterable[NamedTensor]) -> str:
    """sha256 over name, dtype and shape of tensors, in order, in hexadecimal."""
    digest = hashlib.sha256()
    for one in tensors:
        shape = ",".join(map(str, one.shape))
        digest.update(f"{one.name}\0{one.dtype}\0{shape}\n".encode())
    return digest.hexdigest()


class WeightProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A few tokens and what the published weights compute on them: an engine that computes
    something else does not serve these weights."""

    ids: list[int]
    logprobs: list[float]
    """Log-prob of each token but the first, by the model's own forward in float32."""


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One published version of the weights, stored in etcd as a JSON object of these fields."""

    weight_version: int
    """Increases with each publication and is never reused."""
    step: int = 0
    """Optimizer step of these weights."""
    tensor_names: list[str]
    """In the order in which the tensors are hashed and sent."""
    total_bytes: int
    digest: str
    """As `digest_of` returns it."""
    source: str
    """The trainer that published it, host:port."""
    layout: str = ""
    """As `layout_of` returns it; "" by a trainer of an earlier release."""
    probe: WeightProbe | None = None
    """None by a trainer of an earlier release, and by one that has no model in memory."""

    def encode(self) -> bytes:
        """The value stored in etcd."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> WeightManifest:
        """Raises `DataLoss` for a value that is not a manifest."""
        try:
            return msgspec.json.decode(value, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DataLoss(f"the weight manifest is unreadable: {error}") from error


Arriving = Callable[[int, int], AsyncIterator[NamedTensor]]
"""Yields the tensors of a version from a number on, as they arrive. Raises `NotFound`."""


class WeightServicer(WeightServiceServicer):
    """Sends the weights that this process holds."""

    def __init__(
        self,
        held: Callable[[], Mapping[int, Sequence[NamedTensor]]],
        *,
        arriving: Arriving | None = None,
    ) -> None:
        """`held` returns the tensors of each version held, in the manifest's order; `arriving`
        those of a version that this process fetches itself."""
        self._held = held
        self._arriving = arriving

    async def FetchWeights(  # noqa: N802 - named by the proto
        self, request: FetchWeightsRequest, context: Any
    ) -> AsyncIterator[FetchWeightsResponse]:
        """Sends the tensors of one version. Raises `NotFound`."""
        held = self._held()
        newer = request.weight_version > max(held, default=0)
        if newer and self._arriving is not None and request.slices:
            from_byte = request.from_byte
            async for tensor in self._arriving(request.weight_version, request.from_tensor):
                for piece in codec.slices(tensor, from_byte=from_byte):
                    yield FetchWeightsResponse(slice=piece)
                from_byte = 0
            return
        if request.weight_version not in held:
            versions = sorted(held) or "no weights"
            raise NotFound(
                f"weight_version {request.weight_version} is not held here; held: {versions}"
            )
        async for response in weight_responses(request, held[request.weight_version]):
            yield response


async def weight_responses(
    request: FetchWeightsRequest,
    tensors: Sequence[NamedTensor],
    *,
    slice_bytes: int = CHUNK_BYTES,
) -> AsyncIterator[FetchWeightsResponse]:
    """The responses of FetchWeights that send these tensors in the manifest's order.

    Raises `FailedPrecondition` when the caller takes no slices and a tensor needs them,
    `InvalidArgument` for a start position beyond the end.
    """
    if request.slices:
        from_byte = request.from_byte
        rest = tensors[request.from_tensor :]
        if from_byte and (not rest or from_byte >= len(rest[0].data)):
            raise InvalidArgument(
                f"from_byte = {from_byte}: beyond the end of tensor {request.from_tensor}"
            )
        for tensor in rest:
            for piece in codec.slices(tensor, from_byte=from_byte, slice_bytes=slice_bytes):
                yield FetchWeightsResponse(slice=piece)
            from_byte = 0
        return
    for tensor in tensors:
        codec.require_serializable(tensor)
    for tensor in tensors:
        for chunk in split(await asyncio.to_thread(codec.serialize, tensor)):
            yield FetchWeightsResponse(tensor=chunk)
