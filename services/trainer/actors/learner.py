"""The learner: the one owner of model and optimizer, on a thread of its own.

Owns loading, stepping, and copies of the moment for publication and checkpoints. When to do
which is decided by `services.trainer.actors.training`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.batch_plan import BatchPlan
from forge.rl.learner import Learner, Reference, StepResult
from forge.rl.policy import TreePolicy
from forge.rl.precision import computes_bfloat16
from forge.runtime.actor import ThreadActor
from forge.runtime.telemetry import log
from services.trainer.checkpoints import Checkpoint, CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.contents import LEARNER_FILE, UNREADABLE, Contents, outline, read, read_heads
from services.trainer.lora import LoraTrainee
from services.trainer.trainee import OWN_DIRECTORY, Trainee, load_model
from services.trainer.weights import NamedTensor, Snapshot

_BASE = "base"
"""In the learner's file: the fingerprint of what the checkpoint needs besides itself."""

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
        self._check_checkpoint()
        self._learner.policy.check()

    def receive(self, message: Any) -> Any:
        match message:
            case Step(plan=plan, weight_version=weight_version):
                return self._step(plan, weight_version)
            case TakeSnapshot(step=step):
                return self._snapshot(step)
            case Capture():
                return self._capture()
            case Restore():
                return self._restore()
        return super().receive(message)

    def _start_over(self) -> None:
        """The starting weights, and an optimizer that has seen nothing."""
        torch.manual_seed(self._config.seed)
        model = load_model(self._model_path)
        autocast = _trunk_type(self._config.autocast, model.device)
        lora = self._config.lora()
        self._trainee = (
            LoraTrainee(model, lora, model_path=self._model_path) if lora else Trainee(model)
        )
        balance_coef = self._config.balance_coef
        policy = TreePolicy(model, autocast=autocast, balance_coef=balance_coef)
        self._learner = Learner(policy, self._config.learner(), reference=self._reference(policy))
        heads = read_heads(self._model_path) if self._learner.mtp else {}
        if self._learner.mtp and heads:
            self._learner.mtp.heads.load_tensors(heads)

    def _reference(self, policy: TreePolicy) -> Reference | None:
        """A frozen copy of the model, but for adapters on it: their base is there already."""
        if not self._config.kl_coef:
            return None
        path = Path(self._config.reference_path or self._model_path)
        if isinstance(self._trainee, LoraTrainee) and path == self._model_path:
            return self._trainee.base_reference(policy)
        frozen = load_model(path).requires_grad_(False).eval()
        return TreePolicy(frozen, autocast=policy.autocast)

    def _heads(self) -> dict[str, Tensor]:
        return self._learner.mtp.heads.named_tensors() if self._learner.mtp else {}

    def _step(self, plan: BatchPlan, weight_version: int) -> StepResult:
        return self._learner.step(plan, weight_version=weight_version)

    def _snapshot(self, step: int) -> Snapshot:
        name_of_type = self._config.publish_dtype
        if name_of_type == "auto":
            name_of_type = "bfloat16" if self._learner.policy.autocast else "float32"
        tensors = []
        for name, tensor in chain(self._trainee.published(), self._heads().items()):
            copy = tensor.to(_DTYPES[name_of_type], copy=True).contiguous()
            data: Any = copy.reshape(-1).view(torch.uint8).numpy()
            tensors.append(
                NamedTensor(
                    name=name,
                    dtype=name_of_type,
                    shape=tuple(copy.shape),
                    data=memoryview(data),
                )
            )
        return Snapshot(step=step, tensors=tensors)

    def _capture(self) -> Contents:
        trainee = self._trainee
        return Contents.captured(
            trainee.saved(),
            {**self._learner.state_dict(), _BASE: trainee.base},
            weights_file=trainee.weights_file,
            sidecars=trainee.sidecars(),
            model_path=self._model_path,
            heads=self._heads(),
        )

    def _restore(self) -> Checkpoint | None:
        for checkpoint in self._checkpoints.newest_first():
            try:
                weights, state = read(checkpoint.path, self._trainee.weights_file)
            except UNREADABLE as error:
                log.error("checkpoint_damaged", path=str(checkpoint.path), error=repr(error))
                self._checkpoints.set_aside(checkpoint)
                continue
            self._adopt(checkpoint, weights, state)
            return checkpoint
        if self._learner.steps:
            self._start_over()
        return None

    def _check_checkpoint(self) -> None:
        """Raises `ConfigError` when the one to go on from is not of this run: better now, in one
        line, than once everything else stands. One that is damaged is dealt with at the restore."""
        for checkpoint in self._checkpoints.newest_first():
            try:
                shapes, state = outline(checkpoint.path, self._trainee.weights_file)
            except UNREADABLE:
                continue
            source = checkpoint.path / self._trainee.weights_file
            self._trainee.check(shapes, base=state.get(_BASE, ""), source=source)
            try:
                self._learner.check_state(state)
            except InvalidArgument as error:
                source = checkpoint.path / LEARNER_FILE
                raise ConfigError(f"{source}: {error}. {OWN_DIRECTORY}") from error
            return

    def _adopt(
        self, checkpoint: Checkpoint, weights: dict[str, Tensor], state: dict[str, Any]
    ) -> None:
        source = checkpoint.path / self._trainee.weights_file
        self._trainee.load(weights, base=state.pop(_BASE, ""), source=source)
        self._learner.load_state_dict(state)
        log.info("checkpoint_restored", path=str(checkpoint.path), step=checkpoint.step)


def _trunk_type(setting: str, device: torch.device) -> torch.dtype | None:
    """None: the master weights' own."""
    wanted = setting == "bfloat16" or (setting == "auto" and computes_bfloat16(device))
    return torch.bfloat16 if wanted else None
