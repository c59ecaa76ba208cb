"""The files of a checkpoint: the published model, and the state that training needs to continue.

Owns the files and their formats. The writer process (`services.trainer.checkpoint.writer`) writes
those with tensors; `services.trainer.checkpoint.reading` reads all, and
`services.trainer.checkpoint.store` decides whether they are complete.

    model.safetensors, mtp.safetensors  the published tensors in their published type; with
                                        configuration and tokenizer, a model directory
    model-<k>-of-<n>.safetensors        instead, from ranks that shard: each writes some tensors,
                                        and model.safetensors.index.json names the file of each
    published.json                      their order, type and digest
    state/rank-<r>.safetensors          that rank's shards of optimizer, critic and draft heads, and
                                        of the float32 weights that the optimizer steps, unless the
                                        model's files have them
    state/digests.json                  sha256 of each file of the state
    adapter/                            with LoRA, the weights that the optimizer steps, in PEFT's
                                        layout
    learner.pt                          the other state, and an outline of the tensors in state/

Earlier releases stored all state in learner.pt, and the master weights in master.safetensors or in
the place of the model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forge.core.errors import first_line
from forge.core.named_tensor import NamedTensor
from forge.runtime.files.sync import sync
from services.trainer.checkpoint.shards import Shard, places_in_whole, save_tensors
from services.trainer.checkpoint.shared_memory import SharedMemory
from services.trainer.checkpoint.writer import Place, TensorFile, WrittenFile
from services.trainer.checkpoint.writer_process import WriterProcess

MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADS_FILE = "mtp.safetensors"
PUBLISHED_FILE = "published.json"
MASTER_FILE = "master.safetensors"
LEARNER_FILE = "learner.pt"
STATE_DIRECTORY = "state"
DIGESTS_FILE = f"{STATE_DIRECTORY}/digests.json"
STATE_FILE = "state.json"
"""Marks a directory as a checkpoint of `services.trainer.checkpoint.store`."""
MASTER_PREFIX = "master."
"""Prefix of the names in state/ of master weights."""
LEARNER_PREFIX = "learner."
"""Prefix of the names in state/ of the learner's tensors."""
_OF_OTHER_WEIGHTS = (".index.json", STATE_FILE, PUBLISHED_FILE, "adapter_config.json")
"""Files of a starting model that describe its weights: not copied beside other weights."""


class SavingRanks(Protocol):
    """The ranks above 0, which write their part of the same checkpoint."""

    def begin(self, directory: Path) -> None:
        """Let each rank write into `directory`."""
        ...

    def written(self) -> list[WrittenFile]:
        """Wait for all of them. Raises `OSError` when one could not write or has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """One rank's part of the state of one step, copied to host memory; it never changes.

    Rank 0 has the parts that are not divided, too.
    """

    model: Mapping[str, Tensor]
    """Published tensors that this rank writes, in that order, without draft heads."""
    model_file: str = MODEL_FILE
    shards: Sequence[Shard] = ()
    """This rank's part of state/."""
    rank: int = 0
    learner: Mapping[str, Any] = field(default_factory=dict)
    """The learner's state; the tensors that state/ has are without data, on torch's meta device."""
    model_path: Path = Path()
    """Source of configuration and tokenizer."""
    adapters: Mapping[str, Tensor] = field(default_factory=dict)
    """With LoRA: the weights that the optimizer steps."""
    adapter_file: str = ""
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    """Draft heads as published; in a separate file, which loaders of the model ignore."""
    sidecars: Mapping[str, str] = field(default_factory=dict)
    """Text files, by name."""
    weight_map: Mapping[str, str] = field(default_factory=dict)
    """The file of each published tensor, in order, if there are several; without draft heads."""
    others: SavingRanks | None = None
    memory: SharedMemory = field(default_factory=SharedMemory)
    """Memory of the tensors; `write` first copies there those that are elsewhere."""
    writer: WriterProcess = field(default_factory=WriterProcess)

    def write(self, directory: Path) -> None:
        """Write a whole checkpoint, as rank 0; the other ranks write beside it.

        Raises `OSError`, for example when the disk is full.
        """
        for name in (self.adapter_file, DIGESTS_FILE, *self.sidecars):
            (directory / name).parent.mkdir(exist_ok=True)
        if self.others is not None:
            self.others.begin(directory)
        try:
            files = self._write_tensors(directory, [*self._part(), *self._undivided()])
            self._write_others(directory)
        finally:
            # The caller removes the directory after an error. No rank may write to it then.
            others = self.others.written() if self.others is not None else []
        self._describe(directory, [*files, *others])

    def write_part(self, directory: Path) -> list[WrittenFile]:
        """Write the part of one rank, durably. Raises `OSError`."""
        return self._write_tensors(directory, self._part())

    def _write_tensors(self, directory: Path, files: Sequence[TensorFile]) -> list[WrittenFile]:
        written = self.writer.write(directory, files, self.memory)
        for folder in (directory, directory / STATE_DIRECTORY):
            sync(folder)
        return written

    def _part(self) -> list[TensorFile]:
        """The files that each rank writes."""
        files = []
        if self.model:
            places = self.memory.places(self.model)
            files.append(_tensor_file(self.model_file, places, digested=places))
        if self.shards:
            name = f"{STATE_DIRECTORY}/rank-{self.rank:05d}.safetensors"
            places = self.memory.places({one.name: one.data for one in self.shards})
            files.append(_tensor_file(name, places, about=places_in_whole(self.shards)))
        return files

    def _undivided(self) -> list[TensorFile]:
        """The files that rank 0 alone writes."""
        files = []
        if self.heads:
            places = self.memory.places(self.heads)
            # Without a file map the model has one digest, which includes the heads.
            others = [] if self.weight_map else self.memory.places(self.model)
            files.append(_tensor_file(HEADS_FILE, places, digested=[*others, *places]))
        if self.adapters:
            files.append(_tensor_file(self.adapter_file, self.memory.places(self.adapters)))
        return files

    def _write_others(self, directory: Path) -> None:
        copy_description(self.model_path, directory)
        _declare_type(directory / "config.json", self._dtype)
        try:
            torch.save(dict(self.learner), directory / LEARNER_FILE)
        except RuntimeError as error:
            # torch raises RuntimeError for a failed write.
            raise OSError(0, first_line(error)) from error
        for name, text in self.sidecars.items():
            (directory / name).write_text(text, encoding="utf-8")

    @property
    def _dtype(self) -> str:
        return type_name(next(iter([*self.model.values(), *self.heads.values()])))  # all have one

    def _describe(self, directory: Path, files: Sequence[WrittenFile]) -> None:
        """Write what describes the files of all ranks."""
        found = {one.name: one.sha256 for one in files}
        state = {name for name in found if name.startswith(STATE_DIRECTORY)} | {self.adapter_file}
        digests = {name: found.pop(name) for name in [*found] if name in state}
        digests[LEARNER_FILE] = file_digest(directory / LEARNER_FILE)
        (directory / DIGESTS_FILE).write_text(json.dumps(digests), encoding="utf-8")
        about: dict[str, Any] = {"dtype": self._dtype}
        names = [*(self.weight_map or self.model), *self.heads]
        if self.weight_map:
            about["files"] = found
            about["digest"] = digest_of_files(found)
            index = {"metadata": {}, "weight_map": dict(self.weight_map)}
            (directory / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
        else:
            about["digest"] = found[HEADS_FILE if self.heads else self.model_file]
        about["tensor_names"] = names
        (directory / PUBLISHED_FILE).write_text(json.dumps(about), encoding="utf-8")


def digest_of_files(files: Mapping[str, str]) -> str:
    """The digest of a published model in several files, from the digest of each."""
    lines = (f"{name} {files[name]}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_model(directory: Path, weights: Mapping[str, Tensor], model_path: Path) -> None:
    """Write weights, and configuration and tokenizer of `model_path`. Raises `OSError`."""
    save_tensors(weights, directory / MODEL_FILE)
    copy_description(model_path, directory)


def copy_description(model_path: Path, directory: Path) -> None:
    """Copy configuration and tokenizer of a model. Raises `OSError`."""
    for pattern in ("*.json", "*.jinja", "*.txt", "*.model"):
        for file in model_path.glob(pattern):
            if not file.name.endswith(_OF_OTHER_WEIGHTS):
                shutil.copyfile(file, directory / file.name)


def type_name(tensor: Tensor) -> str:
    """The tensor's type as torch names it, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def _declare_type(config_file: Path, dtype: str) -> None:
    """Write the type of the weights into a model's configuration: loaders convert weights to the
    type named there."""
    if config_file.is_file():
        config = json.loads(config_file.read_text(encoding="utf-8"))
        for part in (config, *(one for one in config.values() if isinstance(one, dict))):
            if "torch_dtype" in part:
                part["torch_dtype"] = dtype
            if part is config or "dtype" in part:
                part["dtype"] = dtype
        config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def named_tensors(tensors: Mapping[str, Tensor]) -> list[NamedTensor]:
    """Contiguous host tensors as they are published, not copied."""
    return [
        NamedTensor(name=name, dtype=type_name(one), shape=tuple(one.shape), data=raw_bytes(one))
        for name, one in tensors.items()
    ]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The data of a contiguous host tensor, not copied: little-endian, C order."""
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _tensor_file(
    name: str,
    tensors: list[Place],
    *,
    about: Mapping[str, str] | None = None,
    digested: list[Place] | None = None,
) -> TensorFile:
    about = {"format": "pt", **(about or {})}
    return TensorFile(name=name, tensors=tensors, about=about, digested=digested)


def file_digest(file: Path) -> str:
    """sha256 of a file, hexadecimal. Raises `OSError`."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def mapped(change: Callable[[str, Tensor], Any], value: Any, path: str = "") -> Any:
    """The same nested dicts, lists and tuples, with every tensor changed; `change` gets its path,
    the keys and numbers on the way to it, too."""
    match value:
        case Tensor():
            return change(path.removesuffix("."), value)
        case dict():
            return {key: mapped(change, part, f"{path}{key}.") for key, part in value.items()}
        case list() | tuple():
            parts = [mapped(change, part, f"{path}{n}.") for n, part in enumerate(value)]
            return type(value)(parts)
    return value
