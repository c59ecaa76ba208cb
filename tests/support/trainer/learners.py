"""The trainer's learner by itself, on a model of a few thousand weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.trainer.actors.learner import LearnerActor
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig


def started_learner(model_path: Path, checkpoints: Path, **settings: Any) -> LearnerActor:
    """Started in this thread, with these settings of the trainer's."""
    config = TrainerConfig(model_path=str(model_path), torch_threads=1, **settings)
    actor = LearnerActor(config, CheckpointStore(checkpoints))
    actor.started()
    return actor
