"""The files of a checkpoint: the published model, and the state that training needs to continue.

Owns the files and their formats; `services.trainer.checkpoint.store` decides whether they are
complete.

    model.safetensors, mtp.safetensors  the published tensors in their published type; with
                                        configuration and tokenizer, a model directory
    published.json                      their order, type and digest, as in the manifest in etcd
    master.safetensors                  float32 weights that the optimizer steps; absent where
                                        model.safetensors is the same
    adapter/                            with LoRA, instead of master.safetensors: PEFT's directory
    learner.pt                          optimizer, critic, random state

Earlier releases stored the master weights, or the adapters, in the place of the model.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.core.errors import ConfigError, DataLoss, InvalidArgument
from forge.runtime.weights import digest_of
from services.trainer.model.full_weights import OWN_DIRECTORY
from services.trainer.model.lora import ADAPTER_DIRECTORY, ADAPTER_FILE

MODEL_FILE = "model.safetensors"
HEADS_FILE = "mtp.safetensors"
PUBLISHED_FILE = "published.json"
MASTER_FILE = "master.safetensors"
LEARNER_FILE = "learner.pt"
STATE_FILE = "state.json"
"""Marks a directory as a checkpoint of `services.trainer.checkpoint.store`."""
_OF_OTHER_WEIGHTS = (".index.json", STATE_FILE, PUBLISHED_FILE, "adapter_config.json")
"""Files of a starting model that describe its weights: not copied beside other weights."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The state of one step, copied to host memory; it never changes."""

    model: Mapping[str, Tensor]
    """As published, in that order, without draft heads."""
    learner: Mapping[str, Any]
    model_path: Path
    """Source of configuration and tokenizer."""
    master: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights that the optimizer steps; empty where `model` is the same."""
    master_file: str = MASTER_FILE
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    """Draft heads as published; in a separate file, which loaders of the model ignore."""
    sidecars: Mapping[str, str] = field(default_factory=dict)
    """Text files, by name."""

    def write(self, directory: Path) -> None:
        """Raises `OSError`, for example when the disk is full."""
        for name in (self.master_file, *self.sidecars):
            (directory / name).parent.mkdir(exist_ok=True)
        write_model(directory, self.model, self.model_path)
        if self.heads:
            _save_tensors(self.heads, directory / HEADS_FILE)
        if self.master:
            _save_tensors(self.master, directory / self.master_file)
        published = {**self.model, **self.heads}
        dtype = type_name(next(iter(published.values())))  # all have one
        _declare_type(directory / "config.json", dtype)
        about = {
            "dtype": dtype,
            "digest": digest_of(map(raw_bytes, published.values())),
            "tensor_names": list(published),
        }
        (directory / PUBLISHED_FILE).write_text(json.dumps(about), encoding="utf-8")
        try:
            torch.save(dict(self.learner), directory / LEARNER_FILE)
        except RuntimeError as error:
            # torch raises RuntimeError for a failed write.
            raise OSError(0, str(error).splitlines()[0]) from error
        for name, text in self.sidecars.items():
            (directory / name).write_text(text, encoding="utf-8")


def write_model(directory: Path, weights: Mapping[str, Tensor], model_path: Path) -> None:
    """Write weights, and configuration and tokenizer of `model_path`. Raises `OSError`."""
    _save_tensors(weights, directory / MODEL_FILE)
    for pattern in ("*.json", "*.jinja", "*.txt", "*.model"):
        for file in model_path.glob(pattern):
            if not file.name.endswith(_OF_OTHER_WEIGHTS):
                shutil.copyfile(file, directory / file.name)


def _save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(0, str(error)) from error


def type_name(tensor: Tensor) -> str:
    """Its type as torch names it, without `torch.`."""
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


def raw_bytes(tensor: Tensor) -> memoryview:
    """The data of a contiguous host tensor, not copied: little-endian, C order."""
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def read_published(directory: Path) -> dict[str, Tensor]:
    """The published tensors in a checkpoint, heads included, in their order; empty for a checkpoint
    of an earlier release that has none.

    Raises `DataLoss` when their digest is wrong, or one of `UNREADABLE`.
    """
    if not (directory / PUBLISHED_FILE).is_file():
        return {}
    about = json.loads((directory / PUBLISHED_FILE).read_text(encoding="utf-8"))
    found = {**load_file(directory / MODEL_FILE), **read_heads(directory)}
    tensors = {name: found[name] for name in about["tensor_names"]}
    digest = digest_of(map(raw_bytes, tensors.values()))
    if digest != about["digest"] or len(found) != len(tensors):
        raise DataLoss(f"{directory / MODEL_FILE}: sha256 {digest}, not {about['digest']}")
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


def master_in(directory: Path, master_file: str) -> Path:
    """The file of a checkpoint with the weights that the optimizer steps; newer ones have
    `master_file`.

    Raises `ConfigError` for adapters in place of all weights, or the reverse.
    """
    adapters = [f"{ADAPTER_DIRECTORY}/{ADAPTER_FILE}", ADAPTER_FILE]
    wanted = adapters if master_file in adapters else [MASTER_FILE, MODEL_FILE]
    of_adapters = any((directory / name).is_file() for name in adapters)
    if of_adapters == (wanted is adapters):
        for name in wanted:
            if (directory / name).is_file():
                return directory / name
    kind = "with adapters (LoRA)" if of_adapters else "with all weights trained"
    missing = Path(master_file).name
    raise ConfigError(f"{directory} has no {missing}: it is from a run {kind}. {OWN_DIRECTORY}")


def read(directory: Path, master_file: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights that the optimizer steps, and the learner's state. Raises one of `UNREADABLE`
    when they are damaged."""
    state = torch.load(directory / LEARNER_FILE, weights_only=True)
    return load_file(master_in(directory, master_file)), _with_heads(state, directory)


def _with_heads(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The learner's state with the draft heads: published in float32 they are their own master."""
    mtp = state.get("mtp")
    if not mtp or "heads" in mtp:
        return state
    return {**state, "mtp": {**mtp, "heads": load_file(directory / HEADS_FILE)}}


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nested dicts, lists and tuples, with every tensor changed."""
    match value:
        case Tensor():
            return change(value)
        case dict():
            return {key: mapped(change, part) for key, part in value.items()}
        case list():
            return [mapped(change, part) for part in value]
        case tuple():
            return tuple(mapped(change, part) for part in value)
    return value


def outline(directory: Path, master_file: str) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Shapes of the weights that the optimizer steps, and the learner's state, mapped from disk.

    Raises one of `UNREADABLE` when they are damaged, `ConfigError` like `master_in`.
    """
    with safe_open(master_in(directory, master_file), framework="pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    state = torch.load(directory / LEARNER_FILE, weights_only=True, mmap=True, map_location="cpu")
    return shapes, _with_heads(state, directory)
