"""Segments of a manifest: together they are the whole version, byte for byte."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import DataLoss, FailedPrecondition, NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.weights import HeldWeights, Segment, WeightAnnouncement, WeightServicer
from forge.runtime.weights.delta import DeltaEncoder
from forge.runtime.weights.manifest import SLICE_BYTES
from forge.runtime.weights.segments import cut, owner_of
from forge.v1.inference_pb2 import FetchWeightsRequest

SIZES = st.lists(st.integers(0, 50) | st.just(10**12), max_size=30)


@given(SIZES, st.integers(1, 9))
def test_parts_are_contiguous_and_of_nearly_equal_bytes(sizes: list[int], parts: int) -> None:
    """Each tensor is in one part; a part has at most its share and one largest tensor."""
    found = cut(sizes, parts)
    assert len(found) == parts
    assert [number for part in found for number in part] == list(range(len(sizes)))
    for part in found:
        assert sum(sizes[part.start : part.stop]) <= sum(sizes) / parts + max(sizes, default=0)


@given(SIZES, st.integers(1, 9))
def test_owner_of_each_tensor_is_the_rank_that_has_it(sizes: list[int], parts: int) -> None:
    """Ranks without a tensor are left out of the announcement."""
    ranges = [part for part in cut(sizes, parts) if part]
    segments = [Segment(part.start, f"host:{part.start}") for part in ranges]
    for part in ranges:
        for number in part:
            found = owner_of(segments, number, tensors=len(sizes))
            assert found == (f"host:{part.start}", part.stop)


def test_segments_that_leave_a_gap_are_refused() -> None:
    """As is one order of them in which no source is the first one's."""
    value = b'{"weight_version":1,"total_bytes":1,"digest":"a","source":"h:1","manifest":"b",'
    for segments in ('[[1,"h:2"]]', '[[0,"h:1"],[0,"h:2"]]', '[[0,"h:1"],[3,"h:2"],[2,"h:3"]]'):
        with pytest.raises(DataLoss, match="its segments begin at"):
            WeightAnnouncement.decode(value + f'"segments":{segments}}}'.encode())
    found = WeightAnnouncement.decode(value + b'"segments":[[0,"h:1"],[3,"h:2"]]}')
    assert found.segments == (Segment(0, "h:1"), Segment(3, "h:2"))


def tensors(rng: Random, sizes: list[int]) -> list[NamedTensor]:
    return [
        NamedTensor(name=f"t{number}", dtype="uint8", shape=(size,), data=rng.randbytes(size))
        for number, size in enumerate(sizes)
    ]


async def fetched(servicer: WeightServicer, **request: Any) -> tuple[list[str], bytes]:
    """Names and data that one call sends."""
    wanted = FetchWeightsRequest(slices=True, groups=True, segments=True, **request)
    slices = [one async for found in servicer.FetchWeights(wanted, None) for one in found.slices]
    return list(dict.fromkeys(one.name for one in slices)), b"".join(one.data for one in slices)


@pytest.mark.parametrize("base_version", [0, 1])
async def test_segments_send_the_bytes_of_the_whole_version(base_version: int) -> None:
    """From any tensor and slice on, deltas too: as a rank that has all of them sends it."""
    rng = Random(0)
    sizes = [2 * SLICE_BYTES + 3, 0, 40, SLICE_BYTES, 7, 3 * SLICE_BYTES + 1]
    new = tensors(rng, sizes)
    old = [
        NamedTensor(name=one.name, dtype="uint8", shape=one.shape, data=bytes(one.data)[:-1] + b"x")
        if len(one.data)
        else one
        for one in new
    ]

    def servicer(segment: range | None = None) -> WeightServicer:
        part = segment if segment is not None else range(len(sizes))
        held = {
            version: HeldWeights(tensors=which[part.start : part.stop], segment=segment)
            for version, which in ((1, old), (2, new))
        }
        return WeightServicer(lambda: held, deltas=DeltaEncoder())

    whole = servicer()
    wanted = {"weight_version": 2, "base_version": base_version}
    names, data = await fetched(whole, **wanted)
    parts = [part for part in cut(sizes, 3) if part]
    assert len(parts) == 3
    found = [await fetched(servicer(part), from_tensor=part.start, **wanted) for part in parts]
    assert [name for part_names, _ in found for name in part_names] == names
    assert b"".join(part_data for _, part_data in found) == data
    tail = {"from_tensor": 5, "from_byte": SLICE_BYTES, **wanted}
    assert await fetched(servicer(parts[-1]), **tail) == await fetched(whole, **tail)


async def test_segment_is_not_sent_in_place_of_the_whole_version() -> None:
    """A caller of an earlier release gets one clear line; a wrong rank names what it has."""
    held = {1: HeldWeights(tensors=tensors(Random(0), [4, 4]), segment=range(3, 5))}
    servicer = WeightServicer(lambda: held)
    earlier = FetchWeightsRequest(weight_version=1, slices=True, groups=True)
    with pytest.raises(FailedPrecondition, match=r"several ranks.*upgrade workers first"):
        await anext(servicer.FetchWeights(earlier, None))
    for number in (2, 5):
        with pytest.raises(NotFound, match=f"tensor {number} .* sends 2 tensors from 3 on"):
            await fetched(servicer, weight_version=1, from_tensor=number)
