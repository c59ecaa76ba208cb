"""One version of the weights during its transfer, from successive sources.

Needs numpy for deltas, so that `forge.runtime.weights` itself does not import this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_digest

from forge.core.errors import DataLoss
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.tensors import SliceAssembler, parse
from forge.runtime.weights import delta as delta_codec
from forge.runtime.weights.bulk import BulkConnection, BulkError
from forge.runtime.weights.manifest import SLICE_BYTES, TensorEntry, slice_digests, slices_of
from forge.runtime.weights.service import BULK_BYTES, Part, delta_parts
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import TensorSlice


class DamagedDelta(DataLoss):
    """A delta that does not give the announced tensor: fetch it whole."""


class DamagedBulk(DataLoss):
    """A slice of a bulk connection that is not the announced one: fetch it over gRPC."""


class _Room(NamedTuple):
    """Memory for slices of one tensor."""

    entry: TensorEntry
    assembler: SliceAssembler
    """Of this tensor."""
    start: int
    """Position of the first slice in the tensor."""
    slices: list[memoryview]


_NO_ROOM = _Room(TensorEntry("", "", (), 0, b""), SliceAssembler(), 0, [])
"""Of a slice with its data."""


class WeightAssembly:
    """The data received so far, in the manifest's order."""

    def __init__(
        self,
        version: int,
        names: Sequence[str],
        *,
        total_bytes: int,
        entries: Sequence[TensorEntry],
        base_version: int = 0,
        base: Mapping[str, NamedTensor] | None = None,
    ) -> None:
        """`entries`: of the manifest; none if the trainer is of an earlier release. `base`: the
        tensors of `base_version`, to which deltas are applied."""
        self.tensors: dict[str, NamedTensor] = {}
        """Complete tensors, by name."""
        self.version = version
        self.names = names
        self.total_bytes = total_bytes
        self.base_version = base_version
        self.deltas: dict[str, bytes] = {}
        """Deltas that gave a complete tensor, by name."""
        self.wire_bytes = 0
        """Bytes that were sent; a delta counts with its own size."""
        self.bulk_bytes = 0
        """Those of them that a bulk connection sent."""
        self._base = base or {}
        self._entries = entries
        self._whole_bytes = 0
        self._slices = SliceAssembler()
        self._delta = SliceAssembler()
        self._joiner = Joiner()
        self._chunked = False

    @property
    def received_bytes(self) -> int:
        """Received data, contiguous from the first byte."""
        return self._whole_bytes + self._slices.pending_bytes

    @property
    def _left_bytes(self) -> int:
        """Most data of the next tensor."""
        return self.total_bytes - self._whole_bytes

    @property
    def complete(self) -> bool:
        """Whether all tensors have arrived."""
        return len(self.tensors) == len(self.names)

    def request(self, *, bulk: bool = False) -> pb.FetchWeightsRequest:
        """Return the request for all missing bytes; `bulk`: accept a bulk connection."""
        # Drops an incomplete message of an earlier source, and memory without its data.
        self._slices.take_back()
        self._joiner = Joiner(max_bytes=self.total_bytes + (1 << 20))
        self._chunked = False
        self._delta = SliceAssembler()
        return pb.FetchWeightsRequest(
            weight_version=self.version,
            slices=True,
            groups=bool(self._entries),
            from_tensor=len(self.tensors),
            from_byte=self._slices.pending_bytes,
            base_version=self.base_version if self._entries else 0,
            segments=bool(self._entries),
            bulk=bulk and bool(self._entries),
        )

    def adopt(self, tensors: Sequence[NamedTensor]) -> None:
        """Take all tensors, verified and in order, in place of the data received so far."""
        self._restart()
        for tensor in tensors:
            self._keep(tensor)

    def take(self, tensors: Sequence[NamedTensor]) -> None:
        """Add the next tensors, verified and in order. Raises `DataLoss` for others."""
        for tensor in tensors:
            self._expect_name(tensor.name, len(self.tensors))
            self.wire_bytes += len(tensor.data)
            self._keep(tensor)

    def refuse_deltas(self) -> None:
        """Take whole tensors from here on."""
        self.base_version, self._base = 0, {}

    async def add(
        self, response: pb.FetchWeightsResponse, bulk: BulkConnection | None = None
    ) -> None:
        """Add a response, with the data that follows on `bulk`. Raises `DataLoss` if it does not
        continue the received data, or is not the data of the manifest; verified data before it
        stays. Raises `ResourceExhausted` without memory, `BulkError` if the connection fails."""
        if response.HasField("tensor"):
            self._keep(self._of_chunk(response))
            return
        pieces, digests, failure = response.slices or (response.slice,), list[bytes](), None
        rooms = self._rooms(pieces)
        if slices := [data for room in rooms for data in room.slices]:
            if bulk is None:
                raise DataLoss(f"weights {self.version}: no bulk data is expected here")
            try:
                await bulk.receive(slices, digests)
            except BulkError as error:
                failure = error
        received = iter(digests)
        for piece, room in zip(pieces, rooms, strict=True):
            if not room.slices:
                await self._add_piece(piece)
            elif not self._fill(room, received) and failure is not None:
                raise failure

    async def _add_piece(self, piece: TensorSlice) -> None:
        self._expect_name(piece.name, len(self.tensors))
        # Each access to the field copies it.
        data, left_bytes = piece.data, self._left_bytes
        self.wire_bytes += len(data)
        if piece.base_version:
            await self._add_delta(piece, data)
        elif self._entries:
            entry = self._entries[len(self.tensors)]
            _check_place(piece, len(data), entry, version=self.version)
            start, digest = piece.offset_bytes, xxh3_64_digest(data)
            _check(digest, start, len(data), entry, version=self.version)
            self._keep(self._slices.add_data(piece, data, max_bytes=left_bytes))
        else:
            self._keep(self._slices.add(piece, max_bytes=left_bytes))

    def ready(
        self,
        from_tensor: int,
        from_byte: int,
        *,
        base_version: int,
        in_delta: bool,
        slice_bytes: int = SLICE_BYTES,
    ) -> Iterator[Part]:
        """Yield the received slices from a byte of a tensor, or of its delta, on; `slice_bytes`:
        most data of one, a multiple of `SLICE_BYTES`."""
        for name in self.names[from_tensor : len(self.tensors)]:
            tensor, delta = self.tensors[name], self.deltas.get(name)
            # 0 is no base: this worker takes no deltas any more, or the other one has none.
            fits = delta is not None and self.base_version == base_version > 0
            if in_delta or (fits and not from_byte):
                yield from delta_parts(tensor, delta or b"", base_version, from_byte=from_byte)
            else:
                yield from _parts(tensor, from_byte, len(tensor.data), slice_bytes)
            from_byte, in_delta = 0, False
        pending = self._slices.pending()
        if pending is not None and from_tensor <= len(self.tensors):
            yield from _parts(pending, from_byte, self._slices.pending_bytes, slice_bytes)

    def _keep(self, tensor: NamedTensor | None) -> None:
        if tensor is not None:
            self.tensors[tensor.name] = tensor
            self._whole_bytes += len(tensor.data)

    def _rooms(self, pieces: Sequence[TensorSlice]) -> list[_Room]:
        """Allocate the memory of each slice whose data follows on the bulk connection."""
        if not any(piece.bulk_bytes for piece in pieces):
            return [_NO_ROOM] * len(pieces)
        rooms: list[_Room] = []
        at, slices, left_bytes = len(self.tensors), self._slices, self._left_bytes
        for piece in pieces:
            size_bytes = piece.bulk_bytes or len(piece.data)
            if piece.bulk_bytes:
                entry = self._expected(piece.name, at)
                _check_place(piece, size_bytes, entry, version=self.version)
                if at > len(self.tensors) and not piece.offset_bytes:
                    slices = SliceAssembler()
                data = slices.room(piece, size_bytes, max_bytes=left_bytes)
                rooms.append(_Room(entry, slices, piece.offset_bytes, list(slices_of(data))))
            else:
                rooms.append(_NO_ROOM)
            at += piece.offset_bytes + size_bytes == piece.whole_bytes
        return rooms

    def _fill(self, room: _Room, received: Iterator[bytes]) -> bool:
        """Add the slices of a room for which there are digests; whether these are all. Raises
        `DamagedBulk`."""
        start = room.start
        for data in room.slices:
            digest = next(received, None)
            if digest is None:
                return False
            _check(digest, start, len(data), room.entry, version=self.version, kind=DamagedBulk)
            self._slices = room.assembler
            self.wire_bytes += len(data)
            self.bulk_bytes += len(data)
            start += len(data)
            self._keep(room.assembler.filled(start))
        return True

    async def _add_delta(self, piece: TensorSlice, data: bytes) -> None:
        """Raises `DataLoss` if the delta does not give the announced tensor."""
        entry = self._entries[len(self.tensors)] if self._entries else None
        if entry is None or piece.base_version != self.base_version or self._slices.pending_bytes:
            raise DataLoss(f"weights {self.version}: {piece.name}: a delta is not expected here")
        whole = self._delta.add_data(piece, data, max_bytes=entry.size_bytes)
        if whole is None:
            return
        self._delta = SliceAssembler()
        base = self._base.get(entry.name)
        try:
            if entry.size_bytes > SLICE_BYTES:
                tensor = await asyncio.to_thread(_applied, entry, base, whole.data)
            else:
                tensor = _applied(entry, base, whole.data)
        except DataLoss as error:
            raise DamagedDelta(f"weights {self.version}: {entry.name}: {error}") from None
        self._keep(tensor)
        self.deltas[entry.name] = bytes(whole.data)

    def _of_chunk(self, response: pb.FetchWeightsResponse) -> NamedTensor | None:
        """Add a chunk of an earlier release's source, which begins with the first tensor."""
        if not self._chunked:
            self._chunked = True
            self._restart()
        whole = self._joiner.add(response.tensor)
        if whole is None:
            return None
        tensor = parse(whole)
        self._expect_name(tensor.name, len(self.tensors))
        if self._entries and TensorEntry.of(tensor).digests != (
            self._entries[len(self.tensors)].digests
        ):
            raise DataLoss(f"weights {self.version}: {tensor.name} is damaged")
        return tensor

    def _restart(self) -> None:
        self.tensors.clear()
        self._whole_bytes = 0
        self._slices = SliceAssembler()

    def _expected(self, name: str, at: int) -> TensorEntry:
        """Return the entry of a tensor. Raises `DataLoss` for another one."""
        if not self._entries:
            raise DataLoss(f"weights {self.version}: {name}: there is no manifest")
        self._expect_name(name, at)
        return self._entries[at]

    def _expect_name(self, name: str, at: int) -> None:
        expected = self.names[at] if at < len(self.names) else None
        if name != expected:
            raise DataLoss(
                f"weights {self.version}: tensor {at} is {name!r}, announced is {expected!r}"
            )


def _applied(
    entry: TensorEntry, base: NamedTensor | None, delta: bytes | memoryview
) -> NamedTensor:
    if base is None or (base.dtype, base.shape) != (entry.dtype, entry.shape):
        raise DataLoss(f"the delta is against another tensor than {base and base.shape}")
    item_bytes = delta_codec.item_bytes(entry.shape, entry.size_bytes)
    data = delta_codec.apply(base.data, delta, item_bytes=item_bytes)
    found = slice_digests(slices_of(memoryview(data)))
    if found != entry.digests:
        raise DataLoss("the delta gives data with another digest than announced")
    return NamedTensor(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        data=memoryview(data).toreadonly(),
    )


def _parts(tensor: NamedTensor, from_byte: int, end: int, slice_bytes: int) -> Iterator[Part]:
    view = memoryview(tensor.data)
    whole = end == view.nbytes
    for start in range(from_byte, end if end or not whole else 1, slice_bytes):
        yield Part(tensor, start, view[start : min(start + slice_bytes, end)], view.nbytes)


def _check_place(piece: TensorSlice, size_bytes: int, entry: TensorEntry, *, version: int) -> None:
    """Compare form and place of a slice with the manifest. Raises `DataLoss`."""
    announced = (entry.dtype, entry.shape, entry.size_bytes)
    found = (piece.dtype, tuple(piece.shape), piece.whole_bytes)
    if found != announced:
        raise DataLoss(f"weights {version}: {entry.name} is {found}, announced is {announced}")
    start, end = piece.offset_bytes, piece.offset_bytes + size_bytes
    whole = end == entry.size_bytes or (size_bytes and not end % SLICE_BYTES)
    most = BULK_BYTES if piece.bulk_bytes else SLICE_BYTES
    if start % SLICE_BYTES or not whole or size_bytes > most:
        raise DataLoss(
            f"weights {version}: {entry.name}: {size_bytes} bytes at {start} are not a slice"
        )


def _check(
    digest: bytes,
    start: int,
    size_bytes: int,
    entry: TensorEntry,
    *,
    version: int,
    kind: type[DataLoss] = DataLoss,
) -> None:
    """Compare a slice's digest with the manifest. Raises a `DataLoss` that names it."""
    number = start // SLICE_BYTES
    if digest != entry.digest(number):
        raise kind(
            f"weights {version}: slice {number} of {entry.name} is damaged: its "
            f"{size_bytes} bytes at {start} have another digest than announced"
        )
