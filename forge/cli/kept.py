"""The model that a run keeps: its files in a checkpoint, and whether they hold the weights served.

Reads safetensors files by their header, since a command line needs no torch. The trainer owns what
is in a checkpoint (docs/services/trainer.md).
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

MODEL_FILES = ("model.safetensors", "mtp.safetensors")
PUBLISHED_FILE = "published.json"
_MANIFEST_KEY = "weights/default/latest"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """The model files of a checkpoint, read and hashed."""

    path: Path
    digest: str
    """sha256 over the tensors' data, in the order published, in hexadecimal."""
    dtype: str
    tensor_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """Whether a run's workers serve its kept model."""

    path: Path
    weight_version: int
    """Newest version announced."""
    problem: str
    """Why the kept model is not what is served; "" if it is, bit for bit."""


class Register(Protocol):
    """Reads etcd; a `Coordinator` does."""

    async def get(self, key: str) -> Any:
        """The value with its revision, or None. Raises `Unavailable`."""


def read_kept(checkpoint: Path) -> KeptModel:
    """The kept model of a checkpoint.

    Raises `NotFound` for a directory that keeps none, `DataLoss` when the tensors in its files are
    not those that were published.
    """
    try:
        about = json.loads((checkpoint / PUBLISHED_FILE).read_text(encoding="utf-8"))
        found = dict(one for name in MODEL_FILES for one in _tensors(checkpoint / name))
        digest = hashlib.sha256()
        for name in about["tensor_names"]:
            for chunk in _data(*found[name]):
                digest.update(chunk)
    except FileNotFoundError as error:
        raise NotFound(
            f"{error.filename} is missing: {checkpoint} keeps no model; checkpoints have one since "
            "they keep the published weights, so resume the run and let it save another"
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
    """Name, file, begin and end of the data of each tensor; none where there are no heads."""
    if file.name != MODEL_FILES[0] and not file.exists():
        return
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file.name} has no safetensors header")
        header = json.loads(opened.read(length))
    for name, one in header.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
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
    """Compare the kept model's files with the newest weights announced, whose digest every worker
    verifies before it serves them. A measurement by versions older than the last step's, of a run
    that was extended, is of another model.

    Raises `Unavailable` when etcd does not answer.
    """
    entry = await register.get(_MANIFEST_KEY)
    manifest = json.loads(entry.value) if entry is not None else {}
    problem = ""
    try:
        kept = await asyncio.to_thread(read_kept, checkpoint.resolve())
        if kept.digest != manifest.get("digest"):
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
        weight_version=manifest.get("weight_version", 0),
        problem=problem,
    )
