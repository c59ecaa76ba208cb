"""Announcements and manifests across releases, and damaged ones."""

from __future__ import annotations

import json

import msgspec
import pytest

from forge.core.errors import DataLoss
from forge.core.named_tensor import NamedTensor
from forge.runtime.weights import (
    TensorEntry,
    WeightAnnouncement,
    WeightManifest,
    content_digest,
    manifest_key,
)

# As an earlier release wrote it, byte for byte.
STORED = (
    b'{"weight_version": 7, "step": 6, "tensor_names": ["w", "a"], "total_bytes": 12, '
    b'"digest": "ab", "source": "host:1"}'
)


class EarlierManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The value in etcd as release 0.1.0 reads it."""

    weight_version: int
    step: int = 0
    tensor_names: list[str]
    total_bytes: int
    digest: str
    source: str


def manifest(count: int = 2) -> WeightManifest:
    tensors = [
        NamedTensor(name=f"model.layers.{at}.w", dtype="uint8", shape=(4,), data=b"abcd")
        for at in range(count)
    ]
    return WeightManifest(weight_version=3, step=2, tensors=tuple(map(TensorEntry.of, tensors)))


def announcement(described: WeightManifest) -> WeightAnnouncement:
    return WeightAnnouncement.of(described, described.encode(), source="host:1")


def test_announcement_of_an_earlier_release_is_read() -> None:
    """A worker of this release serves a trainer of an earlier one."""
    assert WeightAnnouncement.decode(STORED) == WeightAnnouncement(
        weight_version=7,
        step=6,
        tensor_names=("w", "a"),
        total_bytes=12,
        digest="ab",
        source="host:1",
    )


def test_worker_of_an_earlier_release_refuses_the_announcement_in_one_line() -> None:
    """It logs `weight_manifest_unreadable` with this error: workers are upgraded first."""
    value = announcement(manifest()).encode()
    with pytest.raises(msgspec.ValidationError, match="missing required field `tensor_names`"):
        msgspec.json.decode(value, type=EarlierManifest)


def test_announcement_of_many_tensors_fits_etcd() -> None:
    """Of 50,000 tensors, too: the manifest is streamed."""
    described = manifest(50_000)
    assert len(announcement(described).encode()) < 1000
    assert announcement(described).open(described.encode()) == described
    assert len(described.encode()) > 1_500_000


def test_manifest_with_another_digest_is_refused() -> None:
    """By its sha256, before it is decoded."""
    described = manifest()
    encoded = described.encode().replace(b"layers.1", b"layers.2")
    with pytest.raises(DataLoss, match="weights 3: the manifest has sha256 "):
        announcement(described).open(encoded)


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (TensorEntry("w", "uint8", (4,), 4, b""), "w has 4 bytes and 0 digests of slices"),
        (TensorEntry("w", "uint8", (4,), (1 << 20) + 1, bytes(8)), "and 1 digests of slices"),
        (TensorEntry("w", "uint8", (4,), -1, bytes(8)), "w has -1 bytes"),
    ],
)
def test_manifest_without_a_digest_for_each_slice_is_refused(
    entry: TensorEntry, fault: str
) -> None:
    """The error names the tensor."""
    encoded = WeightManifest(weight_version=3, tensors=(entry,)).encode()
    with pytest.raises(DataLoss, match=fault):
        WeightManifest.decode(encoded)


def test_content_digest_is_that_of_the_tensors_alone() -> None:
    """Equal weights under another version have the same; another type has another."""
    first = manifest()
    later = msgspec.structs.replace(first, weight_version=9, step=8)
    assert content_digest(first.tensors) == content_digest(later.tensors)
    retyped = [msgspec.structs.replace(one, dtype="int8") for one in first.tensors]
    assert content_digest(first.tensors) != content_digest(retyped)


def test_field_of_a_later_release_is_ignored() -> None:
    """In announcement and manifest."""
    described = manifest()
    for kind, value in (
        (WeightAnnouncement, announcement(described).encode()),
        (WeightManifest, described.encode()),
    ):
        later = json.dumps({**json.loads(value), "compression": "none"}).encode()
        assert kind.decode(later) == kind.decode(value)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b'{"weight_version": "7"}', b"\xff", b'{"\xff', b'{"a":' * 5000]
)
def test_value_that_is_no_manifest_is_data_loss(value: bytes) -> None:
    """The error names the fault."""
    with pytest.raises(DataLoss, match="the weight manifest is unreadable: "):
        WeightAnnouncement.decode(value)


def test_each_policy_has_its_key() -> None:
    """The key of the default policy is the one of earlier releases."""
    assert manifest_key() == "weights/default/latest"
    assert manifest_key("critic") == "weights/critic/latest"
