"""The model being trained: which of its tensors are trained, sent to inference and saved.

Owns loading it and naming its tensors; a model with adapters is `services.trainer.model.lora`. How
it is stepped is `forge.rl.learner.learner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.core.errors import ConfigError, InvalidArgument, NotFound
from forge.rl.model.shapes import difference

OWN_DIRECTORY = "Give the run a checkpoint.dir of its own, or the settings it began with."
"""What to do about a checkpoint of something else."""


class Trainee:
    """A model all of whose weights are trained."""

    master_file: ClassVar[str] = "master.safetensors"
    """Of a checkpoint: what the optimizer steps."""
    base: str = ""
    """Fingerprint of what a checkpoint does not hold and needs; "" when it needs nothing."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """What inference gets, one tensor at a time, before it is rounded to the type published:
        names and shapes of the model directory."""
        yield from own_tensors(self.model).items()

    def names(self) -> list[str]:
        """Of the tensors that inference gets, in order."""
        return list(own_tensors(self.model))

    def master(self) -> dict[str, Tensor]:
        """What the optimizer steps: the tensors themselves, not copies."""
        return own_tensors(self.model)

    def sidecars(self) -> Mapping[str, str]:
        """Further text files of a checkpoint, by name."""
        return {}

    def check(self, shapes: Mapping[str, Sequence[int]], *, base: str, source: Path) -> None:
        """Raises `ConfigError` when what was saved in the file `source` is of another model."""
        odd = difference(self.master(), shapes)
        if odd:
            raise ConfigError(f"{source} is of another model than this run: {odd}. {OWN_DIRECTORY}")
        if base != self.base:
            raise ConfigError(
                f"{source} has adapters of another base model than this run's. {OWN_DIRECTORY}"
            )

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], *, base: str, source: Path) -> None:
        """Go back to what was saved. Raises `ConfigError` when it is of another model."""
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        self.check(shapes, base=base, source=source)
        for name, tensor in self.master().items():
            tensor.copy_(weights[name])


def load_model(path: Path, *, device: torch.device | str = "cpu") -> Any:
    """The causal language model in a model directory, on `device`, in float32, and without dropout
    of its own: the engine that samples has none, so ratios would be its noise.

    Raises `NotFound` when there is none, `InvalidArgument` when transformers cannot read it.
    """
    if not (path / "config.json").is_file():
        raise NotFound(f"model_path = {str(path)!r}: no model directory (config.json is missing)")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidArgument(f"model_path = {str(path)!r}: {error}") from error
    return model.eval().to(device)


def own_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights by name, each once: a tied one goes by its first name."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            named[name] = tensor
    return named
