"""A version of the weights: its tensors with the digests of their slices, and its announcement.

The announcement is small and in etcd, which refuses values above 1.5 MB; it has the sha256 of the
manifest. The manifest is streamed, like the tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import msgspec
from xxhash import xxh3_64_digest

from forge.core.errors import DataLoss
from forge.core.named_tensor import HubPart, HubParts, NamedTensor
from forge.runtime.stored_json import decode_stored
from forge.runtime.weights.segments import Segment

DEFAULT_POLICY = "default"
TRAINER_STANDBYS = f"trainer/{DEFAULT_POLICY}/standby/"
"""Prefix of the etcd keys of trainers that wait for their election."""
MEMORY_KEY = "host_memory"
"""Metadata of a worker: the shared memory that it sees, as `host_memory.place` names it."""
DIRECTORY_WAY = "directory"
"""In an announcement: the version is in the directory of the setting `weights_dir`."""
SLICE_BYTES = 1 << 20
"""Data under one digest; a tensor's last slice may be shorter."""
_DIGEST_BYTES = 8


def manifest_key(policy: str = DEFAULT_POLICY) -> str:
    """The etcd key of the newest announcement of a policy."""
    return f"weights/{policy}/latest"


def digest_of(tensors: Iterable[bytes | memoryview]) -> str:
    """sha256 over the data of tensors, in order, in hexadecimal."""
    digest = hashlib.sha256()
    for data in tensors:
        digest.update(data)
    return digest.hexdigest()


def layout_of(tensors: Iterable[NamedTensor]) -> str:
    """sha256 over name, dtype and shape of tensors, in order, in hexadecimal."""
    digest = hashlib.sha256()
    for one in tensors:
        digest.update(_layout_line(one.name, one.dtype, one.shape))
    return digest.hexdigest()


def slice_digests(data: Iterable[bytes | memoryview]) -> bytes:
    """XXH3-64 of each slice, seed 0, big-endian, one after the other."""
    return b"".join(map(xxh3_64_digest, data))


def slices_of(data: bytes | memoryview) -> Iterator[memoryview]:
    """Yield the slices of a tensor's data, at least one."""
    view = memoryview(data)
    for start in range(0, max(1, view.nbytes), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]


class WeightProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A few tokens and what the published weights compute on them: an engine that computes
    something else does not serve these weights."""

    ids: list[int]
    logprobs: list[float]
    """Log-prob of each token but the first, by the model's own forward in float32."""
    published: list[float] = []
    """The same with the published values, where they are rounded to 16 bits; may be empty."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a manifest; in JSON an array of these fields."""

    name: str
    dtype: str
    """As torch names it, without `torch.`."""
    shape: tuple[int, ...]
    size_bytes: int
    digests: bytes
    """As `slice_digests` returns it; at least one. In JSON base64."""
    aliases: tuple[str, ...] = ()
    """Further names of the same tensor: tied weights are sent once."""

    @classmethod
    def of(cls, tensor: NamedTensor, *, aliases: Iterable[str] = ()) -> TensorEntry:
        """Describe a tensor."""
        digests = slice_digests(slices_of(tensor.data))
        size_bytes = memoryview(tensor.data).nbytes
        return cls(tensor.name, tensor.dtype, tensor.shape, size_bytes, digests, tuple(aliases))

    def digest(self, number: int) -> bytes:
        """The digest of a slice, from 0."""
        return self.digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]

    def check(self) -> None:
        """Raises `DataLoss` if the number of digests does not fit the size."""
        slices = max(1, -(-self.size_bytes // SLICE_BYTES))
        if self.size_bytes < 0 or len(self.digests) != slices * _DIGEST_BYTES:
            raise DataLoss(
                f"the weight manifest is unreadable: {self.name} has {self.size_bytes} bytes and "
                f"{len(self.digests) / _DIGEST_BYTES:g} digests of slices"
            )


def content_digest(tensors: Iterable[TensorEntry]) -> str:
    """sha256 over names, types, shapes and slice digests of tensors, in order, in hexadecimal: the
    same for the same weights under any version."""
    digest = hashlib.sha256()
    for one in tensors:
        digest.update(_layout_line(one.name, one.dtype, one.shape))
        digest.update(one.digests)
    return digest.hexdigest()


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """One version of the weights; streamed as a JSON object of these fields."""

    weight_version: int
    step: int = 0
    """Optimizer step of these weights."""
    tensors: tuple[TensorEntry, ...]
    """In the order in which they are sent."""
    probe: WeightProbe | None = None
    """None by a trainer that has no model in memory."""
    hub: HubParts | None = None
    """None: not known, or a tensor of the hub is no range of one of these."""

    @cached_property
    def total_bytes(self) -> int:
        """Data of all tensors."""
        return sum(one.size_bytes for one in self.tensors)

    def encode(self) -> bytes:
        """The streamed bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> WeightManifest:
        """Raises `DataLoss` for bytes that are not a manifest."""
        manifest = decode_stored(value, cls, "the weight manifest")
        for tensor in manifest.tensors:
            tensor.check()
        if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
            raise DataLoss("the weight manifest is unreadable: a name is there twice")
        if manifest.hub is not None:
            _check_hub(manifest.tensors, manifest.hub)
        return manifest

    def with_hub_names(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield tensors of this version with their parts on the hub, if these are known."""
        yield from (replace(one, hub=self.hub_parts(one)) for one in tensors)

    def hub_parts(self, tensor: NamedTensor | TensorEntry) -> tuple[HubPart, ...]:
        """Return the parts of one of these tensors on the hub; empty: not known."""
        if self.hub is None:
            return ()
        return self.hub.get(tensor.name, (HubPart(tensor.name, tensor.shape),))


class WeightAnnouncement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest version, stored in etcd as a JSON object of these fields.

    A trainer of an earlier release has the names of all tensors in it and no `manifest`; a worker
    of an earlier release requires these names and refuses the value of this release in one line.
    """

    weight_version: int
    """Increases with each publication and is never reused."""
    step: int = 0
    """Optimizer step of these weights."""
    total_bytes: int
    digest: str
    """As `content_digest` returns it; without `manifest` as `digest_of` does."""
    source: str
    """The trainer that published it, host:port; it sends the manifest, and the tensors unless
    `segments` names their sources."""
    manifest: str = ""
    """sha256 of the encoded manifest, in hexadecimal."""
    ways: tuple[str, ...] = ()
    """Other places with the version as a file: names of shared memory, and `DIRECTORY_WAY`."""
    segments: tuple[Segment, ...] = ()
    """The ranks that send parts of the tensors, in the manifest's order; without: `source` alone
    sends them. A worker of an earlier release ignores them, and `source` refuses its call."""
    tensor_names: tuple[str, ...] | None = None
    """Without `manifest`: in the order in which the tensors are hashed and sent."""
    layout: str = ""
    """Without `manifest`: as `layout_of` returns it, or ""."""
    probe: WeightProbe | None = None
    """Without `manifest`: the probe, if the trainer has one."""

    @classmethod
    def of(
        cls,
        manifest: WeightManifest,
        encoded: bytes,
        *,
        source: str,
        segments: tuple[Segment, ...] = (),
    ) -> WeightAnnouncement:
        """Announce a manifest, `encoded` being its bytes."""
        return cls(
            weight_version=manifest.weight_version,
            step=manifest.step,
            total_bytes=manifest.total_bytes,
            digest=content_digest(manifest.tensors),
            source=source,
            manifest=hashlib.sha256(encoded).hexdigest(),
            segments=segments,
        )

    def encode(self) -> bytes:
        """The value stored in etcd."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> WeightAnnouncement:
        """Raises `DataLoss` for a value that is not an announcement."""
        announced = decode_stored(value, cls, "the weight manifest")
        if not announced.manifest and announced.tensor_names is None:
            raise DataLoss(
                "the weight manifest is unreadable: it has neither `manifest` nor `tensor_names`"
            )
        firsts = [one.first for one in announced.segments]
        if firsts and (firsts[0] or firsts != sorted(set(firsts))):
            raise DataLoss(f"the weight manifest is unreadable: its segments begin at {firsts}")
        return announced

    def open(self, encoded: bytes) -> WeightManifest:
        """Decode the manifest of this version. Raises `DataLoss` for other bytes."""
        found = hashlib.sha256(encoded).hexdigest()
        if found != self.manifest:
            raise DataLoss(
                f"weights {self.weight_version}: the manifest has sha256 {found}, "
                f"not {self.manifest}"
            )
        return WeightManifest.decode(encoded)


def _check_hub(entries: Sequence[TensorEntry], hub: Mapping[str, Sequence[HubPart]]) -> None:
    """Raises `DataLoss` unless the parts of each tensor have all of it once, under names that no
    other has."""
    names = {one.name for one in entries if one.name not in hub}
    count = len(names)
    for one in entries:
        if one.name not in hub:
            continue
        found = _hub_names(one, hub[one.name])
        names.update(found)
        count += len(found)
        if not found or len(names) != count:
            raise DataLoss(
                f"the weight manifest is unreadable: the names of {one.name} on the hub do not "
                f"fit its shape {list(one.shape)} and {one.size_bytes} bytes, or are there twice"
            )
    if unknown := hub.keys() - {one.name for one in entries}:
        raise DataLoss(f"the weight manifest is unreadable: it has no tensor {min(unknown)}")


def _hub_names(entry: TensorEntry, parts: Sequence[HubPart]) -> list[str]:
    """Names on the hub; none unless the parts have each element of the tensor once."""
    elements, end = sum(part.tensors * math.prod(part.shape) for part in parts), 0
    positive = all(min(*part.shape, part.tensors, 1) > 0 for part in parts)
    # Before all are listed: a damaged count may be any number.
    fits = 0 < elements <= entry.size_bytes and not entry.size_bytes % elements
    if not positive or not fits or elements != math.prod(entry.shape):
        return []
    places = [(at, math.prod(one.shape), name) for one in parts for name, at in one.places]
    for start, size, _ in sorted(places):
        if start != end:
            return []
        end += size
    return [name for *_, name in places]


def _layout_line(name: str, dtype: str, shape: Iterable[int]) -> bytes:
    return f"{name}\0{dtype}\0{','.join(map(str, shape))}\n".encode()
