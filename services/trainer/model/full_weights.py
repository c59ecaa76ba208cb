"""The model under training: which of its tensors are trained, published and saved.

Owns loading the model and naming its tensors; `services.trainer.model.lora` does so for adapters,
`forge.rl.learner.learner` takes the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from forge.core.errors import ConfigError, InvalidArgument, NotFound, first_line
from forge.core.named_tensor import HubParts
from forge.rl.model.hub_names import HubNames
from forge.rl.model.probe import check_config
from forge.rl.model.shapes import difference
from forge.runtime.telemetry import log

OWN_DIRECTORY = "Give the run a checkpoint.dir of its own, or the settings it began with."
"""Advice for a checkpoint of another run."""
_NO_OUTLINE = (
    *(OSError, ValueError, LookupError, AttributeError, RuntimeError, TypeError, ImportError),
)
"""transformers' errors for a model that it can load, but not build without memory."""


class Trainee:
    """A model with all weights trained."""

    adapter_file: ClassVar[str] = ""
    """The file of a checkpoint with adapters, if these are trained."""
    base: str = ""
    """Fingerprint of the base model that a checkpoint needs; "" if it needs none."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained, and not the weights."""
        return bool(self.adapter_file)

    def begin(self, seed: int) -> None:
        """Called on all ranks once the model has its weights."""

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors to publish, one at a time and not yet rounded, with the names and shapes of
        the model directory."""
        yield from own_tensors(self.model).items()

    def without_adapters(self) -> AbstractContextManager[None]:
        """Context in which the model computes without adapters."""
        return nullcontext()

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole published tensors, by name, in order."""
        return {name: one.shape for name, one in own_tensors(self.model).items()}

    def tied_names(self) -> dict[str, list[str]]:
        """Further names of published tensors, by the published name."""
        return tied_names(self.model)

    def master(self) -> dict[str, Tensor]:
        """The tensors that the optimizer steps, not copies."""
        return own_tensors(self.model)

    def sidecars(self) -> Mapping[str, str]:
        """Additional text files of a checkpoint, by name."""
        return {}

    def check(self, shapes: Mapping[str, Sequence[int]], *, base: str, source: Path) -> None:
        """Raises `ConfigError` when the file `source` is from another model."""
        odd = difference(self.master(), shapes)
        if odd:
            raise ConfigError(f"{source} is of another model than this run: {odd}. {OWN_DIRECTORY}")
        if base != self.base:
            raise ConfigError(
                f"{source} has adapters for another base model than this run. {OWN_DIRECTORY}"
            )


def load_model(
    path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """The causal language model in a model directory, on `device`, in one type, with dropout off:
    the engine samples without dropout, which would only add noise to the ratios.

    Raises `NotFound` when there is none, `InvalidArgument` when transformers cannot read it.
    """
    require_model(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except SafetensorError as error:
        text = f"a weights file is damaged or incomplete, copy it again: {error}"
        raise InvalidArgument(f"model_path = {str(path)!r}: {text}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"model_path = {str(path)!r}: {error}") from error
    return model.eval().to(device)


def require_model(path: Path) -> None:
    """Raises `NotFound` for a directory without a model."""
    if not (path / "config.json").is_file():
        raise NotFound(
            f"model_path = {str(path)!r} is not a model directory: config.json is missing"
        )


def check_family(model_path: str) -> None:
    """Raises `ConfigError`, in one line, for a model that cannot be trained; reads no weights."""
    try:
        check_config(AutoConfig.from_pretrained(model_path))
    # AttributeError: a dtype in config.json that torch does not have.
    except (InvalidArgument, OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"model_path = {model_path!r}: {error}") from error


def hub_parts(path: Path, published: Mapping[str, Sequence[int]]) -> HubParts | None:
    """See `HubNames.parts`, for the model in a directory; None, with the reason in the log, if
    workers have to convert its published tensors themselves."""
    try:
        return HubNames.of(path).parts(published)
    except (InvalidArgument, *_NO_OUTLINE) as error:
        log.info("hub_names_not_published", reason=first_line(repr(error)))
        return None


def own_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights by name, each once: tied weights have their first name."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor, identity in _identified(model):
        if identity not in seen:
            seen.add(identity)
            named[name] = tensor
    return named


def tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """The names that `own_tensors` leaves out, by the name that it has."""
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for name, _, identity in _identified(model):
        own = first.setdefault(identity, name)
        if own != name:
            tied.setdefault(own, []).append(name)
    return tied


def _identified(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Each name with its tensor, and a number that is equal for tied ones."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        # A rank's part of a small tensor may be empty, and empty tensors share an address.
        addressless = isinstance(tensor, DTensor) or tensor.is_meta
        yield name, tensor, id(parameters[name]) if addressless else tensor.data_ptr()
