"""What a checkpoint holds: weights, the learner's state, and what makes it a model directory.

Owns the files and their formats. That they are whole or not there is the business of
`services.trainer.checkpoints`.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.core.errors import ConfigError, InvalidArgument
from services.trainer.trainee import OWN_DIRECTORY

LEARNER_FILE = "learner.pt"
HEADS_FILE = "mtp.safetensors"
STATE_FILE = "state.json"
"""Of a checkpoint, as which `services.trainer.checkpoints` knows it."""
_OF_OTHER_WEIGHTS = (".index.json", STATE_FILE)
"""What a directory that is trained from says of the weights in it."""
UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    SafetensorError,
    pickle.UnpicklingError,
)
"""What reading a damaged file raises, depending on where the damage is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A moment of training in host memory, which nothing changes any more."""

    weights: Mapping[str, Tensor]
    learner: Mapping[str, Any]
    """Without the heads that draft."""
    weights_file: str
    sidecars: Mapping[str, str]
    """Text files, by name."""
    model_path: Path
    """Configuration and tokenizer are copied from there."""
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    """Those that draft; in a file of their own, which a loader of the model does not look at."""

    @classmethod
    def captured(
        cls,
        weights: Mapping[str, Tensor],
        learner: Mapping[str, Any],
        *,
        weights_file: str,
        sidecars: Mapping[str, str],
        model_path: Path,
    ) -> Contents:
        """Copies: training may go on the moment this returns."""
        mtp = dict(learner.get("mtp", {}))
        heads = mtp.pop("heads", {})
        return cls(
            weights=host_copy(dict(weights)),
            learner=host_copy({**learner, "mtp": mtp}),
            weights_file=weights_file,
            sidecars=sidecars,
            model_path=model_path,
            heads=host_copy(dict(heads)),
        )

    def write(self, directory: Path) -> None:
        """Raises `OSError`, a full disk's among them."""
        write_model(directory, self.weights, self.weights_file, self.model_path)
        if self.heads:
            _save_tensors(self.heads, directory / HEADS_FILE)
        try:
            torch.save(dict(self.learner), directory / LEARNER_FILE)
        except RuntimeError as error:
            # Torch has a word of its own for a write that failed.
            raise OSError(0, str(error).splitlines()[0]) from error
        for name, text in self.sidecars.items():
            (directory / name).write_text(text, encoding="utf-8")


def write_model(
    directory: Path, weights: Mapping[str, Tensor], weights_file: str, model_path: Path
) -> None:
    """Weights, and beside them configuration and tokenizer of `model_path`. Raises `OSError`."""
    _save_tensors(weights, directory / weights_file)
    for pattern in ("*.json", "*.jinja", "*.txt", "*.model"):
        for file in model_path.glob(pattern):
            if not file.name.endswith(_OF_OTHER_WEIGHTS):
                shutil.copyfile(file, directory / file.name)


def _save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(0, str(error)) from error


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


def read(directory: Path, weights_file: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and the learner's state. Raises one of `UNREADABLE` when they are damaged."""
    state = torch.load(directory / LEARNER_FILE, weights_only=True)
    return load_file(directory / weights_file), _with_heads(state, directory)


def _with_heads(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The learner's state, whole. Older checkpoints have the heads in the learner's file, too."""
    mtp = state.get("mtp")
    if not mtp or "heads" in mtp:
        return state
    return {**state, "mtp": {**mtp, "heads": load_file(directory / HEADS_FILE)}}


def host_copy(value: Any) -> Any:
    """The same nest of dicts, lists and tuples, with every tensor copied to host memory."""
    match value:
        case Tensor():
            return value.detach().to("cpu", copy=True)
        case dict():
            return {key: host_copy(part) for key, part in value.items()}
        case list():
            return [host_copy(part) for part in value]
        case tuple():
            return tuple(host_copy(part) for part in value)
    return value


def outline(directory: Path, weights_file: str) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Shapes of the weights, and the learner's state with its tensors left on disk.

    Raises one of `UNREADABLE` when they are damaged, `ConfigError` when there are other weights.
    """
    if not (directory / weights_file).is_file():
        kind = "with all weights trained" if "adapter" in weights_file else "with adapters (LoRA)"
        raise ConfigError(
            f"{directory} holds no {weights_file}: it is of a run {kind}. {OWN_DIRECTORY}"
        )
    with safe_open(directory / weights_file, framework="pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    state = torch.load(directory / LEARNER_FILE, weights_only=True, mmap=True, map_location="cpu")
    return shapes, _with_heads(state, directory)
