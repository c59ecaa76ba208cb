"""The trainer's learner by itself, on a model of a few thousand weights."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from forge.rl.learner.batch_plan import plan_batch
from forge.rl.learner.types import StepResult
from services.trainer.actors.learner import LearnerActor
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.learner.model_replica import Take
from tests.support.rl.models import make_sample


def started_learner(model_path: Path, checkpoints: Path, **settings: Any) -> LearnerActor:
    """Started in this thread, with these settings of the trainer's."""
    config = TrainerConfig(model_path=str(model_path), torch_threads=1, **settings)
    actor = LearnerActor(config, CheckpointStore(checkpoints))
    actor.started()
    return actor


def take_step(actor: LearnerActor) -> StepResult:
    """A step on four short samples."""
    rng = Random(3)
    samples = [make_sample([1, 2, 3, n, n + 1], (3, 5), rng=rng) for n in range(4)]
    plan = plan_batch(samples, token_budget=64, channels=32)
    result: StepResult = actor.receive(Take(plan=plan, weight_version=1))
    assert result.skipped == ""
    return result
