"""Arrays in slices: whole again, byte for byte, and refused when something is missing."""

from __future__ import annotations

import tracemalloc
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted
from forge.core.named_tensor import NamedTensor
from forge.runtime.rpc import tensors
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.tensors import SliceAssembler, slices
from forge.runtime.weights import service
from forge.v1.common_pb2 import Tensor, TensorSlice
from forge.v1.inference_pb2 import FetchWeightsRequest, FetchWeightsResponse
from tests.support.runtime.weight_responses import weight_responses

LIMIT = 1 << 40


def array(name: str, data: bytes) -> NamedTensor:
    return NamedTensor(name=name, dtype="uint8", shape=(len(data),), data=memoryview(data))


def assembled(pieces: list[TensorSlice]) -> list[NamedTensor]:
    assembler = SliceAssembler()
    added = [assembler.add(piece, max_bytes=LIMIT) for piece in pieces]
    return [whole for whole in added if whole is not None]


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(min_value=1, max_value=50))
def test_arrays_of_any_size_survive_slicing(contents: list[bytes], slice_bytes: int) -> None:
    """Also empty ones; no slice exceeds the limit."""
    arrays = [array(f"t{at}", data) for at, data in enumerate(contents)]
    pieces = [piece for one in arrays for piece in slices(one, slice_bytes=slice_bytes)]
    assert all(len(piece.data) <= slice_bytes for piece in pieces)
    assert assembled(pieces) == arrays


def test_offsets_beyond_2_gib_are_exact() -> None:
    """The last slice of an array larger than a protobuf message has its correct offset."""
    size_bytes = (1 << 31) + 5
    # Untouched zero pages take no memory.
    whole = array("embed", bytes(size_bytes))
    (last,) = slices(whole, from_byte=size_bytes - 5)
    assert (last.whole_bytes, last.offset_bytes, last.data) == (
        size_bytes,
        size_bytes - 5,
        bytes(5),
    )
    assert TensorSlice.FromString(last.SerializeToString()) == last


def test_slice_is_copied_into_its_array_alone() -> None:
    """Without a further copy on the way."""
    first, second = slices(array("w", bytes(2 << 20)), slice_bytes=1 << 20)
    assembler, data = SliceAssembler(), second.data
    assembler.add(first, max_bytes=LIMIT)
    tracemalloc.start()
    try:
        assert assembler.add_data(second, data, max_bytes=LIMIT) is not None
        assert tracemalloc.get_traced_memory()[1] < len(data) // 2
    finally:
        tracemalloc.stop()


def test_slices_out_of_place_are_refused() -> None:
    """A gap, a repetition, another length, an empty slice and an array above the limit."""
    first, second, third = slices(array("w", b"abcdef"), slice_bytes=2)
    longer = TensorSlice.FromString(second.SerializeToString())
    longer.whole_bytes = 7
    empty = TensorSlice(name="w", whole_bytes=6, offset_bytes=2)
    for wrong in (first, third, longer, empty):
        assembler = SliceAssembler()
        assembler.add(first, max_bytes=LIMIT)
        with pytest.raises(DataLoss, match="do not continue 2 of 6"):
            assembler.add(wrong, max_bytes=LIMIT)
    with pytest.raises(DataLoss, match="w has 6 bytes; at most 5 are expected"):
        SliceAssembler().add(first, max_bytes=5)


def test_damaged_slice_is_refused() -> None:
    """One bit is enough; the bytes before it stay, and the transfer continues after them. A slice
    of an earlier release has no checksum."""
    first, second, third = slices(array("w", b"abcdef"), slice_bytes=2)
    damaged = TensorSlice.FromString(second.SerializeToString())
    damaged.data = b"bd"
    assembler = SliceAssembler()
    assembler.add(first, max_bytes=LIMIT)
    with pytest.raises(DataLoss, match="w: the 2 bytes at 2 are damaged"):
        assembler.add(damaged, max_bytes=LIMIT)
    assert assembler.pending_bytes == 2
    second.ClearField("xxh3_64")
    assert assembler.add(second, max_bytes=LIMIT) is None
    whole = assembler.add(third, max_bytes=LIMIT)
    assert whole is not None and bytes(whole.data) == b"abcdef"


def test_array_without_memory_is_resource_exhausted() -> None:
    """A worker then keeps its weights and retries; the error names the array."""
    huge = TensorSlice(name="w", whole_bytes=1 << 62, data=b"a")
    with pytest.raises(ResourceExhausted, match="w: there is no memory for its 4611686"):
        SliceAssembler().add(huge, max_bytes=1 << 63)


async def fetched(arrays: list[NamedTensor], **request: Any) -> list[FetchWeightsResponse]:
    wanted = FetchWeightsRequest(weight_version=1, **request)
    with patch.object(service, "SLICE_BYTES", 2):
        return [one async for one in weight_responses(wanted, arrays)]


async def test_fetch_begins_at_the_requested_byte() -> None:
    """Of a tensor; all tensors after it follow from their first byte."""
    arrays = [array("a", b"abc"), array("b", b""), array("c", b"defgh")]
    whole = await fetched(arrays, slices=1)
    assert [one.slice.data for one in whole] == [b"ab", b"c", b"", b"de", b"fg", b"h"]
    rest = await fetched(arrays, slices=1, from_tensor=2, from_byte=2)
    assert [one.slice.data for one in rest] == [b"fg", b"h"]
    assert await fetched(arrays, slices=1, from_tensor=3) == []
    with pytest.raises(InvalidArgument, match="from_byte = 3: beyond the end of tensor 0"):
        await fetched(arrays, slices=1, from_byte=3)


async def test_callers_of_an_earlier_release_get_whole_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One message each; a tensor that no message can hold is refused by name."""
    arrays = [array("a", b"abc"), array("b", b"defgh")]
    joiner = Joiner()
    wholes = [joiner.add(response.tensor) for response in await fetched(arrays)]
    assert [Tensor.FromString(whole or b"").data for whole in wholes] == [b"abc", b"defgh"]
    monkeypatch.setattr(tensors, "MAX_SERIALIZED_BYTES", 4)
    with pytest.raises(FailedPrecondition, match="b has 5 bytes, a message holds 4: set `slices`"):
        await fetched(arrays)
