"""One version of the weights during its transfer, from successive sources."""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.errors import DataLoss
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.tensors import SliceAssembler, parse
from forge.v1 import inference_pb2 as pb


class WeightAssembly:
    """The tensors received so far, in the manifest's order."""

    def __init__(self, version: int, names: Sequence[str], *, total_bytes: int) -> None:
        self.tensors: dict[str, NamedTensor] = {}
        """Complete tensors, by name."""
        self.version = version
        self.names = names
        self._total_bytes = total_bytes
        self._whole_bytes = 0
        self._slices = SliceAssembler()
        self._joiner = Joiner()
        self._chunked = False

    @property
    def received_bytes(self) -> int:
        """Received data, contiguous from the first byte."""
        return self._whole_bytes + self._slices.pending_bytes

    @property
    def complete(self) -> bool:
        """Whether all tensors have arrived."""
        return len(self.tensors) == len(self.names)

    def request(self) -> pb.FetchWeightsRequest:
        """Return the request for all missing bytes."""
        # Drops an incomplete message of an earlier source.
        self._joiner = Joiner(max_bytes=self._total_bytes + (1 << 20))
        self._chunked = False
        return pb.FetchWeightsRequest(
            weight_version=self.version,
            slices=True,
            from_tensor=len(self.tensors),
            from_byte=self._slices.pending_bytes,
        )

    def add(self, response: pb.FetchWeightsResponse) -> None:
        """Add a response. Raises `DataLoss` if it does not continue the received data."""
        tensor = (
            self._of_slice(response) if response.HasField("slice") else self._of_chunk(response)
        )
        if tensor is None:
            return
        self.tensors[tensor.name] = tensor
        self._whole_bytes += len(tensor.data)

    def _of_slice(self, response: pb.FetchWeightsResponse) -> NamedTensor | None:
        piece = response.slice
        self._expect_name(piece.name)
        return self._slices.add(piece, max_bytes=self._total_bytes - self._whole_bytes)

    def _of_chunk(self, response: pb.FetchWeightsResponse) -> NamedTensor | None:
        """Add a chunk of an earlier release's source, which begins with the first tensor."""
        if not self._chunked:
            self._chunked = True
            self._restart()
        whole = self._joiner.add(response.tensor)
        if whole is None:
            return None
        tensor = parse(whole)
        self._expect_name(tensor.name)
        return tensor

    def _restart(self) -> None:
        self.tensors.clear()
        self._whole_bytes = 0
        self._slices = SliceAssembler()

    def _expect_name(self, name: str) -> None:
        at = len(self.tensors)
        expected = self.names[at] if at < len(self.names) else None
        if name != expected:
            raise DataLoss(
                f"weights {self.version}: tensor {at} is {name!r}, announced is {expected!r}"
            )
