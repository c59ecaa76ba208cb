"""Tests: names of the hub in a manifest, across releases, and damaged ones."""

from __future__ import annotations

import msgspec
import pytest

from forge.core.errors import DataLoss
from forge.core.named_tensor import HubPart, NamedTensor
from forge.runtime.weights import (
    TensorEntry,
    WeightManifest,
    WeightProbe,
    content_digest,
    layout_of,
)

TENSORS = [
    NamedTensor(name="stack", dtype="uint8", shape=(2, 2, 3), data=bytes(range(12))),
    NamedTensor(name="norm", dtype="uint8", shape=(2,), data=b"ab"),
]
HUB: dict[str, tuple[HubPart, ...]] = {
    "stack": (HubPart("experts.{}.up", (1, 3), 0, 6, 2), HubPart("experts.{}.w", (1, 3), 3, 6, 2))
}


class EarlierManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The manifest as the release before reads it."""

    weight_version: int
    step: int = 0
    tensors: tuple[TensorEntry, ...]
    probe: WeightProbe | None = None


def manifest(hub: dict[str, tuple[HubPart, ...]] | None) -> WeightManifest:
    return WeightManifest(weight_version=3, tensors=tuple(map(TensorEntry.of, TENSORS)), hub=hub)


def test_reader_gets_views_by_the_names_of_the_hub() -> None:
    """No byte is copied; a tensor without another name has its own."""
    received = WeightManifest.decode(manifest(HUB).encode())
    views = [one for tensor in received.with_hub_names(TENSORS) for one in tensor.in_hub_names()]
    assert {one.name: (one.shape, bytes(one.data)) for one in views} == {
        "experts.0.up": ((1, 3), bytes([0, 1, 2])),
        "experts.0.w": ((1, 3), bytes([3, 4, 5])),
        "experts.1.up": ((1, 3), bytes([6, 7, 8])),
        "experts.1.w": ((1, 3), bytes([9, 10, 11])),
        "norm": ((2,), b"ab"),
    }
    assert {memoryview(one.data).obj for one in views} == {one.data for one in TENSORS}


def test_worker_of_an_earlier_release_ignores_the_names() -> None:
    """And its manifest is the same without them."""
    found = msgspec.json.decode(manifest(HUB).encode(), type=EarlierManifest)
    assert found.tensors == manifest(None).tensors
    assert msgspec.json.encode(found) == manifest(None).encode()


def test_trainer_of_an_earlier_release_says_nothing_of_the_hub() -> None:
    """Other than one whose names are all those of the hub."""
    earlier = EarlierManifest(weight_version=3, tensors=manifest(None).tensors)
    unknown = WeightManifest.decode(msgspec.json.encode(earlier))
    assert [one.hub for one in unknown.with_hub_names(TENSORS)] == [(), ()]
    same = WeightManifest.decode(manifest({}).encode())
    assert [one.hub for one in same.with_hub_names(TENSORS)] == [
        (HubPart("stack", (2, 2, 3)),),
        (HubPart("norm", (2,)),),
    ]


def test_digests_are_those_of_the_tensors_alone() -> None:
    """So files, held versions and deltas of both kinds are the same."""
    named = manifest(HUB).with_hub_names(TENSORS)
    assert layout_of(named) == layout_of(TENSORS)
    assert content_digest(manifest(HUB).tensors) == content_digest(manifest(None).tensors)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((), id="none"),
        pytest.param((HubPart("a", (2, 3)),), id="half"),
        pytest.param((HubPart("a", (5, 3)),), id="beyond"),
        pytest.param((HubPart("a", (2, 3)), HubPart("b", (2, 3), 3)), id="overlap"),
        pytest.param((HubPart("a", (2, 3)), HubPart("b", (2, 3), 7)), id="beyond the end"),
        pytest.param((HubPart("{}", (2, 3), 0, 6, 1 << 60),), id="count"),
        pytest.param((HubPart("{}", (2, 3), 0, 5, 2),), id="stride"),
        pytest.param((HubPart("a", (-2, -6)),), id="negative"),
        pytest.param((HubPart("a", (2, 3), 0, 6, 2),), id="one name for two"),
        pytest.param((HubPart("a", (2, 3)), HubPart("a", (2, 3), 6)), id="twice"),
        pytest.param((HubPart("norm", (4, 3)),), id="of another tensor"),
    ],
)
def test_damaged_names_are_refused(parts: tuple[HubPart, ...]) -> None:
    """The error names the tensor."""
    with pytest.raises(DataLoss, match="the names of stack on the hub do not fit its shape"):
        WeightManifest.decode(manifest({"stack": parts}).encode())


def test_names_of_a_tensor_of_another_size_or_of_none_are_refused() -> None:
    """An element has a whole number of bytes."""
    entry = TensorEntry("stack", "bfloat16", (2, 2, 3), 25, bytes(8))
    with pytest.raises(DataLoss, match=r"stack on the hub do not fit .* and 25 bytes"):
        WeightManifest.decode(WeightManifest(weight_version=3, tensors=(entry,), hub=HUB).encode())
    with pytest.raises(DataLoss, match="it has no tensor other"):
        WeightManifest.decode(manifest({"other": (HubPart("a", (2,)),)}).encode())
