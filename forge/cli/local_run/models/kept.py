"""The kept model of a run: its files in a checkpoint, compared with the served weights.

Reads safetensors files by their header, without torch. The trainer owns the content of checkpoints
(docs/services/trainer.md).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge.core.errors import DataLoss, NotFound
from forge.core.named_tensor import SAFETENSORS_DTYPES
from forge.runtime.weights import (
    SLICE_BYTES,
    TensorEntry,
    WeightAnnouncement,
    content_digest,
    manifest_key,
    slice_digests,
)

MODEL_FILES = ("model.safetensors", "mtp.safetensors")
"""Files of a model in one file; the second one, of draft heads, is optional."""
PUBLISHED_FILE = "published.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """The model files of a checkpoint, with their digest."""

    path: Path
    digest: str
    """sha256 over the tensors' data in the order of publication, hexadecimal; of a model in several
    files over the names and digests of these."""
    content: str
    """Digest of these tensors in an announcement of weights."""
    dtype: str
    tensor_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """The comparison of a run's kept model with its served weights."""

    path: Path
    weight_version: int
    """Newest published version."""
    problem: str
    """The difference; "" if the kept model equals the served weights, bit for bit."""


class Register(Protocol):
    """The read access of a `Coordinator` to etcd."""

    async def get(self, key: str) -> Any:
        """Returns the value with its revision, or None. Raises `Unavailable`."""


def read_kept(checkpoint: Path) -> KeptModel:
    """Returns the kept model of a checkpoint.

    Raises `NotFound` for a directory without one, `DataLoss` when the tensors in its files differ
    from the published ones.
    """
    try:
        about = json.loads((checkpoint / PUBLISHED_FILE).read_text(encoding="utf-8"))
        names = [_own_name(name) for name in about.get("files", ())]
        stored = dict(
            tensor for name in names or MODEL_FILES for tensor in _tensors(checkpoint / name)
        )
        digests = {name: hashlib.sha256() for name in names}
        whole = hashlib.sha256()
        entries = [
            _entry(name, one, digests.get(one.file.name, whole).update)
            for name, one in ((name, stored[name]) for name in about["tensor_names"])
        ]
    except FileNotFoundError as error:
        raise NotFound(
            f"{error.filename} is missing: {checkpoint} keeps no model, as checkpoints of earlier "
            "versions; resume the run, so that it saves a new checkpoint"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise DataLoss(f"{checkpoint}: {type(error).__name__}: {error}") from None
    for name in sorted(digests):
        whole.update(f"{name} {digests[name].hexdigest()}\n".encode())
    if whole.hexdigest() != about["digest"]:
        raise DataLoss(f"{checkpoint}: sha256 {whole.hexdigest()}, not {about['digest']}")
    return KeptModel(
        path=checkpoint,
        digest=about["digest"],
        content=content_digest(entries),
        dtype=about["dtype"],
        tensor_names=tuple(about["tensor_names"]),
    )


def _own_name(name: str) -> str:
    """The name of a file in the checkpoint itself. Raises `ValueError`."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file of the checkpoint")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The place of one tensor in a safetensors file."""

    file: Path
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]


def _entry(name: str, stored: _Stored, observe: Callable[[bytes], None]) -> TensorEntry:
    """Describes a tensor; `observe` takes its data, slice by slice."""
    digests = bytearray()
    for data in _data(stored.file, stored.begin, stored.end):
        observe(data)
        digests += slice_digests([data])
    size_bytes = stored.end - stored.begin
    dtype = SAFETENSORS_DTYPES.get(stored.dtype, stored.dtype)
    return TensorEntry(
        name, dtype, stored.shape, size_bytes, bytes(digests) or slice_digests([b""])
    )


def _tensors(file: Path) -> Iterator[tuple[str, _Stored]]:
    """Yields names and places of tensors; nothing if there are no heads."""
    if file.name == MODEL_FILES[1] and not file.exists():
        return
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file.name} has no safetensors header")
        header = json.loads(opened.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield (
                name,
                _Stored(
                    file=file,
                    begin=8 + length + begin,
                    end=8 + length + end,
                    dtype=tensor["dtype"],
                    shape=tuple(tensor["shape"]),
                ),
            )


def _data(file: Path, begin: int, end: int) -> Iterator[bytes]:
    with file.open("rb") as opened:
        opened.seek(begin)
        while begin < end:
            chunk = opened.read(min(SLICE_BYTES, end - begin))
            if not chunk:
                raise ValueError(f"{file.name} ends early")
            begin += len(chunk)
            yield chunk


async def measured_model(
    register: Register, checkpoint: Path, *, sampled_version: int, last_step_version: int
) -> MeasuredModel:
    """Compares the kept model's files with the newest published weights, whose digest every worker
    verifies before it serves them. In a run that was extended, an evaluation with versions older
    than the last step's measured another model.

    Raises `Unavailable` when etcd does not answer, `DataLoss` when its manifest is unreadable.
    """
    entry = await register.get(manifest_key())
    announced = WeightAnnouncement.decode(entry.value) if entry is not None else None
    problem = ""
    try:
        kept = await asyncio.to_thread(read_kept, checkpoint.resolve())
        # Without `manifest`, the trainer is of an earlier release.
        own = kept.content if announced is None or announced.manifest else kept.digest
        if announced is None or own != announced.digest:
            problem = f"its digest {own} is not that of the weights served"
        elif sampled_version < last_step_version:
            problem = (
                f"the tasks were sampled from weight version {sampled_version}, and the last step "
                f"published version {last_step_version}"
            )
    except (NotFound, DataLoss) as error:
        problem = str(error)
    return MeasuredModel(
        path=checkpoint.resolve(),
        weight_version=announced.weight_version if announced else 0,
        problem=problem,
    )
