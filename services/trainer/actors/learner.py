"""The learner: the one owner of model and optimizer, on a thread of its own.

Owns loading, stepping, and copies of the moment for publication and checkpoints. When to do
which is decided by `services.trainer.actors.training`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.core.errors import FailedPrecondition, InvalidArgument, NotFound
from forge.rl.batch_plan import BatchPlan
from forge.rl.learner import Learner, StepResult
from forge.rl.policy import TreePolicy
from forge.runtime.actor import ThreadActor
from forge.runtime.telemetry import log
from services.trainer.checkpoints import Checkpoint, CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.contents import UNREADABLE, Contents, read
from services.trainer.weights import NamedTensor, Snapshot

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Train on a batch; answered by a StepResult."""

    plan: BatchPlan
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Copy the weights as they are now; answered by a Snapshot."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Copy all that a checkpoint holds, as it is now; answered by Contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Go back to the newest checkpoint, answered by it; without any, to the start: None."""


class LearnerActor(ThreadActor):
    """One policy being trained."""

    def __init__(self, config: TrainerConfig, checkpoints: CheckpointStore) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._model_path = Path(config.model_path)

    def started(self) -> None:
        torch.set_num_threads(self._config.threads())
        self._start_over()
        self._learner.policy.check()

    def receive(self, message: Any) -> Any:
        match message:
            case Step(plan=plan, weight_version=weight_version):
                return self._step(plan, weight_version)
            case TakeSnapshot(step=step):
                return self._snapshot(step)
            case Capture():
                return Contents.captured(
                    own_tensors(self._model), self._learner.state_dict(), self._model_path
                )
            case Restore():
                return self._restore()
        return super().receive(message)

    def _start_over(self) -> None:
        """The starting weights, and an optimizer that has seen nothing."""
        torch.manual_seed(self._config.seed)
        autocast = torch.bfloat16 if self._config.autocast == "bfloat16" else None
        self._model = load_model(self._model_path)
        reference = None
        if self._config.kl_coef:
            frozen = load_model(Path(self._config.reference_path or self._model_path))
            reference = TreePolicy(frozen.requires_grad_(False).eval(), autocast=autocast)
        self._learner = Learner(
            TreePolicy(self._model, autocast=autocast), self._config.learner(), reference=reference
        )

    def _step(self, plan: BatchPlan, weight_version: int) -> StepResult:
        return self._learner.step(plan, weight_version=weight_version)

    def _snapshot(self, step: int) -> Snapshot:
        dtype = _DTYPES[self._config.publish_dtype]
        tensors = []
        for name, tensor in own_tensors(self._model).items():
            copy = tensor.to(dtype, copy=True).contiguous()
            data: Any = copy.reshape(-1).view(torch.uint8).numpy()
            tensors.append(
                NamedTensor(
                    name=name,
                    dtype=self._config.publish_dtype,
                    shape=tuple(copy.shape),
                    data=memoryview(data),
                )
            )
        return Snapshot(step=step, tensors=tensors)

    def _restore(self) -> Checkpoint | None:
        for checkpoint in self._checkpoints.newest_first():
            try:
                weights, state = read(checkpoint.path)
            except UNREADABLE as error:
                log.error("checkpoint_damaged", path=str(checkpoint.path), error=repr(error))
                self._checkpoints.set_aside(checkpoint)
                continue
            self._adopt(checkpoint, weights, state)
            return checkpoint
        if self._learner.steps:
            self._start_over()
        return None

    def _adopt(
        self, checkpoint: Checkpoint, weights: dict[str, Tensor], state: dict[str, Any]
    ) -> None:
        own = own_tensors(self._model)
        shapes = {name: tensor.shape for name, tensor in own.items()}
        if shapes != {name: tensor.shape for name, tensor in weights.items()}:
            raise FailedPrecondition(
                f"checkpoint {checkpoint.path} is of another model than {self._model_path}: "
                "give this run a checkpoint_dir of its own"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        self._learner.load_state_dict(state)
        log.info("checkpoint_restored", path=str(checkpoint.path), step=checkpoint.step)


def load_model(path: Path) -> Any:
    """The causal language model in a model directory, in float32, ready to train.

    Raises `NotFound` when there is none, `InvalidArgument` when transformers cannot read it.
    """
    if not (path / "config.json").is_file():
        raise NotFound(f"model_path = {str(path)!r}: no model directory (config.json is missing)")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidArgument(f"model_path = {str(path)!r}: {error}") from error
    return model.train()


def own_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights by name, each once: a tied one goes by its first name."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            named[name] = tensor
    return named
