"""What the trainer's unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.rl.models import tiny_model
from tests.support.trainer.evaluations import Run, System, held_out


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, as any trainer starts from."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", torch.float32).save_pretrained(path)
    return path


@pytest.fixture
def system() -> System:
    """What an evaluation asks."""
    return System()


@pytest.fixture
def run(system: System) -> Run:
    """A run that is evaluated on tasks of two domains."""
    return Run(system, tasks=held_out("code", "qa"))
