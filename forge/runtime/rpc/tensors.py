"""Arrays of any size on the wire: slices of at most 1 MiB with checksums, assembled in place.

An embedding may exceed the 2 GiB of a protobuf message. Slices need no second copy of an array on
either side. Callers of an earlier release get each tensor as one message, if it fits.
"""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from forge.core.errors import DataLoss, FailedPrecondition, ResourceExhausted
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc.chunks import CHUNK_BYTES
from forge.v1.common_pb2 import Tensor, TensorSlice

MAX_SERIALIZED_BYTES = (1 << 31) - (1 << 20)
"""Most data of one protobuf message, with room for the other fields."""


def slices(
    array: NamedTensor, *, from_byte: int = 0, slice_bytes: int = CHUNK_BYTES
) -> Iterator[TensorSlice]:
    """Yield the data from `from_byte` on, in order; at least one slice."""
    view = memoryview(array.data)
    for start in range(from_byte, max(view.nbytes, from_byte + 1), slice_bytes):
        data = bytes(view[start : start + slice_bytes])
        yield TensorSlice(
            name=array.name,
            dtype=array.dtype,
            shape=array.shape,
            whole_bytes=view.nbytes,
            offset_bytes=start,
            data=data,
            xxh3_64=xxh3_64_intdigest(data),
        )


def require_serializable(array: NamedTensor) -> None:
    """Raises `FailedPrecondition` for an array above the limit of one message."""
    if len(array.data) > MAX_SERIALIZED_BYTES:
        raise FailedPrecondition(
            f"{array.name} has {len(array.data)} bytes, a message holds {MAX_SERIALIZED_BYTES}: "
            "set `slices` in the request"
        )


_EMPTY = memoryview(bytearray())


class SliceAssembler:
    """Joins the slices of successive arrays."""

    def __init__(self) -> None:
        self._buffer = _EMPTY
        self._first = TensorSlice()
        self.pending_bytes = 0
        """Received bytes of the unfinished array."""
        self._given_bytes = 0
        """End of the last room."""

    def pending(self) -> NamedTensor | None:
        """The unfinished array, its data complete up to `pending_bytes`; None between arrays."""
        return self._array(self._buffer) if self.pending_bytes else None

    def add(self, piece: TensorSlice, *, max_bytes: int) -> NamedTensor | None:
        """Return the array at its last slice, else None.

        Raises `DataLoss` for a damaged slice, for one out of place and for an array above
        `max_bytes`; the received bytes before it stay. Raises `ResourceExhausted` without memory.
        """
        # Each access to the field copies it.
        data = piece.data
        if piece.HasField("xxh3_64") and piece.xxh3_64 != xxh3_64_intdigest(data):
            raise DataLoss(
                f"{piece.name}: the {len(data)} bytes at {piece.offset_bytes} are damaged: "
                "wrong checksum"
            )
        return self.add_data(piece, data, max_bytes=max_bytes)

    def add_data(self, piece: TensorSlice, data: bytes, *, max_bytes: int) -> NamedTensor | None:
        """Add verified `data` of a slice; returns and raises what `add` does."""
        self.room(piece, len(data), max_bytes=max_bytes)[:] = data
        return self.filled(piece.offset_bytes + len(data))

    def room(self, piece: TensorSlice, size_bytes: int, *, max_bytes: int) -> memoryview:
        """Return the memory of a slice's data, to be filled; raises what `add` does. The next room
        may follow before this one is filled."""
        if piece.offset_bytes == self._given_bytes == 0:
            if piece.whole_bytes > max_bytes:
                raise DataLoss(
                    f"{piece.name} has {piece.whole_bytes} bytes; at most {max_bytes} are expected"
                )
            self._buffer = _allocated(piece)
            self._first = TensorSlice(name=piece.name, dtype=piece.dtype, shape=piece.shape)
        end = piece.offset_bytes + size_bytes
        whole_bytes = len(self._buffer)
        empty = not size_bytes and whole_bytes > 0
        if (
            piece.offset_bytes != self._given_bytes
            or piece.whole_bytes != whole_bytes
            or end > whole_bytes
            or empty
        ):
            raise DataLoss(
                f"{piece.name}: {size_bytes} bytes at {piece.offset_bytes} of "
                f"{piece.whole_bytes} do not continue {self._given_bytes} of {whole_bytes}"
            )
        self._given_bytes = end
        return self._buffer[piece.offset_bytes : end]

    def filled(self, end: int) -> NamedTensor | None:
        """Add the verified data in a `room` up to byte `end` of the array; return the array if it
        is complete."""
        self.pending_bytes = end
        if end < len(self._buffer):
            return None
        buffer, self._buffer, self.pending_bytes = self._buffer, _EMPTY, 0
        self._given_bytes = 0
        return self._array(buffer)

    def take_back(self) -> None:
        """Give the rooms that were not filled again."""
        self._given_bytes = self.pending_bytes

    def _array(self, buffer: memoryview) -> NamedTensor:
        first = self._first
        return NamedTensor(
            name=first.name,
            dtype=first.dtype,
            shape=tuple(first.shape),
            data=buffer.toreadonly(),
        )


def _allocated(piece: TensorSlice) -> memoryview:
    # Processes that receive arrays have numpy; `forge status` imports this module without it.
    import numpy as np

    try:
        # Not filled with zeros: slices before `pending_bytes` alone are read.
        return np.empty(piece.whole_bytes, np.uint8).data
    except MemoryError:
        raise ResourceExhausted(
            f"{piece.name}: there is no memory for its {piece.whole_bytes} bytes"
        ) from None


def serialize(tensor: NamedTensor) -> bytes:
    """The tensor as one protobuf message."""
    return Tensor(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, data=bytes(tensor.data)
    ).SerializeToString()


def parse(message: bytes) -> NamedTensor:
    """The inverse of `serialize`."""
    tensor = Tensor.FromString(message)
    return NamedTensor(
        name=tensor.name, dtype=tensor.dtype, shape=tuple(tensor.shape), data=tensor.data
    )
