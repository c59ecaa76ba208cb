"""The kept model of a run: its files in a checkpoint, compared with the served weights.

Reads safetensors files by their header, without torch. The trainer owns the content of checkpoints
(docs/services/trainer.md).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge.core.errors import DataLoss, NotFound
from forge.runtime.weights import WeightManifest, manifest_key

MODEL_FILES = ("model.safetensors", "mtp.safetensors")
PUBLISHED_FILE = "published.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """The model files of a checkpoint, with their digest."""

    path: Path
    digest: str
    """sha256 over the tensors' data in the order of publication, hexadecimal."""
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
        stored = dict(tensor for name in MODEL_FILES for tensor in _tensors(checkpoint / name))
        digest = hashlib.sha256()
        for name in about["tensor_names"]:
            for chunk in _data(*stored[name]):
                digest.update(chunk)
    except FileNotFoundError as error:
        raise NotFound(
            f"{error.filename} is missing: {checkpoint} keeps no model, as checkpoints of earlier "
            "versions; resume the run, so that it saves a new checkpoint"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise DataLoss(f"{checkpoint}: {type(error).__name__}: {error}") from None
    if digest.hexdigest() != about["digest"]:
        raise DataLoss(f"{checkpoint}: sha256 {digest.hexdigest()}, not {about['digest']}")
    return KeptModel(
        path=checkpoint,
        digest=about["digest"],
        dtype=about["dtype"],
        tensor_names=tuple(about["tensor_names"]),
    )


def _tensors(file: Path) -> Iterator[tuple[str, tuple[Path, int, int]]]:
    """Yields name, file, begin and end of each tensor's data; nothing if there are no heads."""
    if file.name != MODEL_FILES[0] and not file.exists():
        return
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file.name} has no safetensors header")
        header = json.loads(opened.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield name, (file, 8 + length + begin, 8 + length + end)


def _data(file: Path, begin: int, end: int) -> Iterator[bytes]:
    with file.open("rb") as opened:
        opened.seek(begin)
        while begin < end:
            chunk = opened.read(min(_CHUNK_BYTES, end - begin))
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
    announced = WeightManifest.decode(entry.value) if entry is not None else None
    problem = ""
    try:
        kept = await asyncio.to_thread(read_kept, checkpoint.resolve())
        if announced is None or kept.digest != announced.digest:
            problem = f"sha256 {kept.digest} is not that of the weights served"
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
