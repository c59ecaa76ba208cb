"""Starting weights of the tiny model for whole runs, from a shorter course than `forge run` has."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from forge.cli.local_run.models.models import tiny_directory
from services.trainer.starting_weights.tiny import Course, warm_start


def make_starting_weights(root: Path, *, flawless_steps: int, imperfect_steps: int) -> None:
    """For runs with this root and seed 0, unless it has them."""
    model = tiny_directory(root, seed=0)
    if not model.exists():
        course = Course(
            flawless_steps=flawless_steps, imperfect_steps=imperfect_steps, batch_tokens=512
        )
        warm_start(model, seed=0, course=course, console=Console(quiet=True))
