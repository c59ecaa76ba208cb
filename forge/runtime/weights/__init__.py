"""The format in which a trainer publishes weights and workers fetch them.

`manifest`: a version's tensors with the digests of their slices, and its announcement in etcd.
`hold`: the versions that workers serve instead of the newest.
`held`: a version in memory. `service`: the RPCs that send it, or one that arrives. `delta`: the
changed elements of a tensor. `version_files`: versions as files beside gRPC. `group_process`: the
part of a process in groups that receive a version together. `segments`: the parts of a version that
the ranks of a trainer hold. Each service owns the tensors it holds.
"""

from forge.runtime.weights.held import HeldWeights, TensorDeltas
from forge.runtime.weights.hold import BROKEN_KEY, ERROR_KEY, NO_HOLD, WeightHold, hold_key
from forge.runtime.weights.manifest import (
    DEFAULT_POLICY,
    DIRECTORY_WAY,
    MEMORY_KEY,
    SLICE_BYTES,
    TRAINER_STANDBYS,
    TensorEntry,
    WeightAnnouncement,
    WeightManifest,
    WeightProbe,
    content_digest,
    digest_of,
    layout_of,
    manifest_key,
    slice_digests,
)
from forge.runtime.weights.segments import Segment
from forge.runtime.weights.service import (
    BULK_BYTES,
    FULL_NAME,
    GROUP_PARTS,
    Arriving,
    Part,
    WeightServicer,
    delta_parts,
    parts_of,
)

__all__ = [
    "BROKEN_KEY",
    "BULK_BYTES",
    "DEFAULT_POLICY",
    "DIRECTORY_WAY",
    "ERROR_KEY",
    "FULL_NAME",
    "GROUP_PARTS",
    "MEMORY_KEY",
    "NO_HOLD",
    "SLICE_BYTES",
    "TRAINER_STANDBYS",
    "Arriving",
    "HeldWeights",
    "Part",
    "Segment",
    "TensorDeltas",
    "TensorEntry",
    "WeightAnnouncement",
    "WeightHold",
    "WeightManifest",
    "WeightProbe",
    "WeightServicer",
    "content_digest",
    "delta_parts",
    "digest_of",
    "hold_key",
    "layout_of",
    "manifest_key",
    "parts_of",
    "slice_digests",
]
