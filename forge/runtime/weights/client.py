"""Calls to sources of weights: the manifest, and the missing bytes of a version.

The bytes travel over a bulk connection where both ends have it, otherwise in the call. Not here:
the choice of sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge.core.errors import Unavailable
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.streams import flowing
from forge.runtime.weights.assembly import DamagedBulk, WeightAssembly
from forge.runtime.weights.bulk import BulkClient, BulkError, BulkUnreachable
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc

MAX_MANIFEST_BYTES = 1 << 30


class WeightClient:
    """Fetches from sources, and remembers at which of them bulk connections failed."""

    def __init__(self, channels: Channels, bulk: BulkClient, *, silence_s: float) -> None:
        """A call fails after `silence_s` without data."""
        self.bulk = bulk
        self._channels = channels
        self._silence_s = silence_s

    async def manifest(self, address: str, version: int) -> bytes:
        """Return the encoded manifest of a version. Raises the error of the call."""
        stub = self._channels.stub(rpc.WeightServiceStub, address)
        joiner = Joiner(max_bytes=MAX_MANIFEST_BYTES)
        call: Any = stub.FetchManifest(pb.FetchManifestRequest(weight_version=version))
        try:
            async for response in flowing(call, silence_s=self._silence_s, source="the source"):
                whole = joiner.add(response.chunk)
                if whole is not None:
                    return whole
        finally:
            call.cancel()
        raise Unavailable("the source ended its stream within the manifest")

    async def fetch(
        self,
        assembly: WeightAssembly,
        address: str,
        *,
        until: int,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Fetch the missing bytes of the tensors before number `until` into `assembly`; call
        `progress` after each response. Raises what `WeightAssembly.add` does, and the error of the
        call."""
        bulk = self.bulk.wants(address)
        try:
            await self._stream(assembly, address, until=until, progress=progress, bulk=bulk)
        except BulkUnreachable as error:
            self.bulk.avoid(address, error)
            await self._stream(assembly, address, until=until, progress=progress, bulk=False)
        except (BulkError, DamagedBulk) as error:
            self.bulk.avoid(address, error)
            raise

    async def _stream(
        self,
        assembly: WeightAssembly,
        address: str,
        *,
        until: int,
        progress: Callable[[], object],
        bulk: bool,
    ) -> None:
        connection = None
        stub = self._channels.stub(rpc.WeightServiceStub, address)
        call: Any = stub.FetchWeights(assembly.request(bulk=bulk))
        try:
            async for response in flowing(call, silence_s=self._silence_s, source="the source"):
                if response.HasField("bulk"):
                    connection = await self.bulk.connect(
                        address, response.bulk, silence_s=self._silence_s
                    )
                    continue
                await assembly.add(response, connection)
                progress()
                if len(assembly.tensors) >= until:
                    return
        finally:
            call.cancel()
            if connection is not None:
                await connection.close()
        raise Unavailable(
            f"the source ended its stream after {assembly.received_bytes} of "
            f"{assembly.total_bytes} bytes"
        )
