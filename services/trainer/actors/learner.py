"""The learner: the one owner of model and optimizer, on a thread of its own.

Owns stepping, and copies of the moment for publication and checkpoints; what is stepped is a
`services.trainer.learner.model_replica`, or one per rank. When to do which is decided by
`services.trainer.actors.training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.core.named_tensor import NamedTensor
from forge.rl.learner.batch_plan import BatchPlan
from forge.runtime.actor import ThreadActor
from forge.runtime.telemetry import log
from services.trainer.checkpoint.files import UNREADABLE, raw_bytes, read, read_published
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.learner.model_replica import Adopt, Order, Replica, StartOver, Take
from services.trainer.learner.rank_processes import Ranks
from services.trainer.weight_publisher import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Train on a batch; answered by a StepResult."""

    plan: BatchPlan
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Copy the weights to publish as they are now; answered by a Snapshot.

    After a restore, and with `checkpoint`, the tensors are read from the kept model's files.
    DataLoss when these are damaged.
    """

    step: int
    checkpoint: Path | None = None


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
        self._ranks: Ranks | None = None
        self._kept: Mapping[str, Tensor] = {}
        """Of the checkpoint restored, until a step is taken."""

    def started(self) -> None:
        torch.set_num_threads(self._config.threads())
        try:
            if self._config.ranks > 1:
                self._ranks = Ranks(self._config)
            self._replica = Replica(self._config, group=self._ranks.group if self._ranks else None)
            self._check_checkpoint()
            self._replica.check()
        except BaseException:
            self.stopped()
            raise

    def stopped(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def receive(self, message: Any) -> Any:
        match message:
            case Step(plan=plan, weight_version=weight_version):
                return self._order(Take(plan=plan, weight_version=weight_version))
            case TakeSnapshot(step=step, checkpoint=checkpoint):
                kept = read_published(checkpoint) if checkpoint else self._kept
                return self._snapshot(step, kept)
            case Capture():
                return self._replica.captured()
            case Restore():
                return self._restore()
        return super().receive(message)

    def _order(self, order: Order) -> Any:
        self._kept = {}
        if self._ranks is None:
            return self._replica.obey(order)
        self._ranks.tell(order)
        with self._ranks.together():
            return self._replica.obey(order)

    def _snapshot(self, step: int, kept: Mapping[str, Tensor]) -> Snapshot:
        """Of the tensors kept, where they are what this run publishes, else of those in memory."""
        if not self._replica.publishes(kept):
            kept = dict(self._replica.published())
        tensors = [
            NamedTensor(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                data=raw_bytes(tensor),
            )
            for name, tensor in kept.items()
        ]
        return Snapshot(step=step, tensors=tensors)

    def _restore(self) -> Checkpoint | None:
        for checkpoint in self._checkpoints.newest_first():
            try:
                weights, state = read(checkpoint.path, self._replica.master_file)
                kept = read_published(checkpoint.path)
            except UNREADABLE as error:
                log.error("checkpoint_damaged", path=str(checkpoint.path), error=repr(error))
                self._checkpoints.set_aside(checkpoint)
                continue
            if self._ranks is not None:
                self._ranks.tell(Adopt(directory=checkpoint.path))
            self._replica.adopt(checkpoint.path, weights, state)
            self._kept = kept
            log.info("checkpoint_restored", path=str(checkpoint.path), step=checkpoint.step)
            return checkpoint
        if self._replica.steps:
            self._order(StartOver())
        return None

    def _check_checkpoint(self) -> None:
        """Raises `ConfigError` when the one to go on from is not of this run: better now, in one
        line, than once everything else stands. One that is damaged is dealt with at the restore."""
        for checkpoint in self._checkpoints.newest_first():
            try:
                self._replica.fits(checkpoint.path)
            except UNREADABLE:
                continue
            return
