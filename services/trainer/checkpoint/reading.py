"""Reads the files of a checkpoint, of this release and of earlier ones.

Owns where each part of the state is. `services.trainer.checkpoint.files` has the formats.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forge.core.errors import ConfigError, DataLoss, InvalidArgument
from forge.runtime.weights import digest_of
from services.trainer.checkpoint.files import (
    DIGESTS_FILE,
    HEADS_FILE,
    LEARNER_FILE,
    LEARNER_PREFIX,
    MASTER_FILE,
    MASTER_PREFIX,
    MODEL_FILE,
    PUBLISHED_FILE,
    STATE_DIRECTORY,
    digest_of_files,
    file_digest,
    mapped,
    raw_bytes,
)
from services.trainer.checkpoint.shards import fill, sizes_in
from services.trainer.model.full_weights import OWN_DIRECTORY
from services.trainer.model.lora import ADAPTER_DIRECTORY, ADAPTER_FILE

UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    SafetensorError,
    pickle.UnpicklingError,
    DataLoss,
)
"""Errors that reading a damaged file raises."""


def read_published(directory: Path) -> dict[str, Tensor]:
    """The published tensors in a checkpoint, heads included, in their order; empty for a checkpoint
    of an earlier release that has none.

    Raises `DataLoss` when their digest is wrong, or one of `UNREADABLE`.
    """
    if not (directory / PUBLISHED_FILE).is_file():
        return {}
    about = json.loads((directory / PUBLISHED_FILE).read_text(encoding="utf-8"))
    files: dict[str, str] = about.get("files", {})
    parts = [load_file(directory / name) for name in files]
    if not files:
        parts = [{**load_file(directory / MODEL_FILE), **read_heads(directory)}]
    found = {name: one for part in parts for name, one in part.items()}
    tensors = {name: found[name] for name in about["tensor_names"]}
    digests = [
        digest_of(raw_bytes(one) for name, one in tensors.items() if name in part) for part in parts
    ]
    whole = digest_of_files(dict(zip(files, digests, strict=True))) if files else digests[0]
    if whole != about["digest"] or len(found) != len(tensors):
        raise DataLoss(f"{directory / MODEL_FILE}: sha256 {whole}, not {about['digest']}")
    return tensors


def read_heads(directory: Path) -> dict[str, Tensor]:
    """The draft heads of a model directory; empty when it has none.

    Raises `InvalidArgument` when they cannot be read.
    """
    file = directory / HEADS_FILE
    if not file.is_file():
        return {}
    try:
        heads: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise InvalidArgument(f"{file}: {error}") from error
    return heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterWeights:
    """Place of the master weights in a checkpoint."""

    source: Path
    """For messages, and the folder of an adapter's description."""
    files: Sequence[Path]
    prefix: str = ""
    """Prefix of their names in the files."""

    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the master weights, by name. Raises one of `UNREADABLE`."""
        return {
            name.removeprefix(self.prefix): shape
            for name, shape in sizes_in(self.files).items()
            if name.startswith(self.prefix)
        }

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, which may be sharded, by name. Raises `DataLoss`."""
        fill({self.prefix + name: one for name, one in tensors.items()}, self.files)

    def read(self) -> dict[str, Tensor]:
        """Reads all tensors completely. Raises one of `UNREADABLE`."""
        tensors = {name: torch.empty(shape) for name, shape in self.shapes().items()}
        self.fill(tensors)
        return tensors


def master_weights(directory: Path, *, adapters: bool) -> MasterWeights:
    """The weights that the optimizer steps: those of `adapters` (LoRA), or all.

    Raises `ConfigError` for adapters in place of all weights, or the reverse, and one of
    `UNREADABLE`.
    """
    of_adapters = [directory / ADAPTER_DIRECTORY / ADAPTER_FILE, directory / ADAPTER_FILE]
    found = [file for file in of_adapters if file.is_file()]
    if bool(found) == adapters and found:
        return MasterWeights(source=found[0], files=found[:1])
    if bool(found) == adapters:
        shards = state_files(directory)
        if any(name.startswith(MASTER_PREFIX) for name in sizes_in(shards)):
            source = directory / STATE_DIRECTORY
            return MasterWeights(source=source, files=shards, prefix=MASTER_PREFIX)
        files = [one for one in (directory / MASTER_FILE, *model_files(directory)) if one.exists()]
        if files and files[0].name == MASTER_FILE:
            files = files[:1]
        if files:
            return MasterWeights(source=files[0], files=files)
    kind = "with adapters (LoRA)" if found else "with all weights trained"
    missing = ADAPTER_FILE if adapters else MASTER_FILE
    raise ConfigError(f"{directory} has no {missing}: it is from a run {kind}. {OWN_DIRECTORY}")


def model_files(directory: Path) -> list[Path]:
    """The files of the model in a checkpoint, without draft heads."""
    about: dict[str, Any] = {}
    if (directory / PUBLISHED_FILE).is_file():
        about = json.loads((directory / PUBLISHED_FILE).read_text(encoding="utf-8"))
    names = [name for name in about.get("files", ()) if name != HEADS_FILE]
    return [directory / name for name in names or [MODEL_FILE]]


def state_files(directory: Path) -> list[Path]:
    """The shards of all ranks; none in a checkpoint of an earlier release."""
    return sorted((directory / STATE_DIRECTORY).glob("*.safetensors"))


def check_files(master: MasterWeights, directory: Path, *, rank: int = 0, ranks: int = 1) -> None:
    """Read the state of training for damage, this rank its share of the files.

    Raises `DataLoss` for a file with another digest, or one of `UNREADABLE`.
    """
    if (directory / DIGESTS_FILE).is_file():
        digests: dict[str, str] = json.loads((directory / DIGESTS_FILE).read_text("utf-8"))
        for name in sorted(digests)[rank::ranks]:
            found = file_digest(directory / name)
            if found != digests[name]:
                raise DataLoss(f"{directory / name}: sha256 {found}, not {digests[name]}")
    elif not rank:  # of an earlier release
        read_learner(directory)
        for file in master.files:
            load_file(file)


def read_learner(directory: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The learner's state; the tensors that state/ has are on the meta device.

    With `mmap` tensors stay on disk until they are used. Raises one of `UNREADABLE` when it is
    damaged.
    """
    file = directory / LEARNER_FILE
    state: dict[str, Any] = torch.load(file, weights_only=True, mmap=mmap, map_location="cpu")
    mtp = state.get("mtp")
    if not mtp or "heads" in mtp:
        return state
    # Published in float32 the draft heads are their own master weights.
    return {**state, "mtp": {**mtp, "heads": load_file(directory / HEADS_FILE)}}


def fill_learner(state: Mapping[str, Any], outline: Mapping[str, Any], directory: Path) -> None:
    """Fill the tensors of a learner's state that its outline has without data.

    Raises `DataLoss`.
    """
    absent: set[str] = set()
    mapped(lambda path, tensor: absent.add(path) if tensor.is_meta else None, outline)
    targets: dict[str, Tensor] = {}

    def note(path: str, tensor: Tensor) -> None:
        if path in absent:
            targets[LEARNER_PREFIX + path] = tensor

    mapped(note, state)
    fill(targets, state_files(directory))
