"""Manifests are readable by the releases before and after, and one that is not is an error."""

from __future__ import annotations

import json

import pytest

from forge.core.errors import DataLoss
from forge.runtime.weights import WeightManifest, manifest_key

# As an earlier release wrote it, byte for byte.
STORED = (
    b'{"weight_version": 7, "step": 6, "tensor_names": ["w", "a"], "total_bytes": 12, '
    b'"digest": "ab", "source": "host:1"}'
)


def test_stored_manifest_keeps_its_fields() -> None:
    """The JSON object of an earlier release decodes, and encodes to the same object."""
    manifest = WeightManifest.decode(STORED)
    assert manifest == WeightManifest(
        weight_version=7,
        step=6,
        tensor_names=["w", "a"],
        total_bytes=12,
        digest="ab",
        source="host:1",
    )
    assert json.loads(manifest.encode()) == json.loads(STORED)


def test_manifest_field_of_a_later_release_is_ignored() -> None:
    """Workers of this release still read it."""
    later = json.dumps({**json.loads(STORED), "compression": "none"}).encode()
    assert WeightManifest.decode(later) == WeightManifest.decode(STORED)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b'{"weight_version": "7"}', b"\xff", b'{"\xff', b'{"a":' * 5000]
)
def test_value_that_is_no_manifest_is_data_loss(value: bytes) -> None:
    """The error names the fault."""
    with pytest.raises(DataLoss, match="the weight manifest is unreadable: "):
        WeightManifest.decode(value)


def test_each_policy_has_its_key() -> None:
    """The key of the default policy is the one of earlier releases."""
    assert manifest_key() == "weights/default/latest"
    assert manifest_key("critic") == "weights/critic/latest"
