"""A checkpoint that an earlier release wrote: `format_2.tar.xz`, of a run with draft heads that
published in bfloat16, with its starting model."""

from __future__ import annotations

import tarfile
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from forge.rl.config import MtpConfig, OptimizerConfig
from forge.rl.learner.batch_plan import plan_batch
from services.trainer.actors.learner import LearnerActor, Restore
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.reading import master_weights
from services.trainer.learner.model_replica import Capture, Take
from tests.support.rl.models import make_sample
from tests.support.trainer.learners import started_learner

LOSS, GRAD_NORM = -0.35512466728687286, 1.9558135271072388
"""Of the earlier release's next step."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("format_2.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def restored(folder: Path, step: int) -> LearnerActor:
    actor = started_learner(
        folder / "model",
        folder / "checkpoints",
        publish_dtype="bfloat16",
        mtp=MtpConfig(heads=1),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    assert actor.receive(Restore()).step == step
    return actor


def next_step(actor: LearnerActor) -> tuple[float, float]:
    rng = Random(2)
    samples = [
        make_sample([2, n % 13, *[rng.randrange(13) for _ in range(12)]], (4, 14), rng=rng)
        for n in range(8)
    ]
    result = actor.receive(
        Take(plan=plan_batch(samples, token_budget=64, channels=16), weight_version=1)
    )
    return result.loss, result.grad_norm


def test_run_continues_from_a_checkpoint_of_an_earlier_release(folder: Path) -> None:
    """Weights, moments and heads: its next step is that of the earlier release, also once it has
    been saved in the present format."""
    old = folder / "checkpoints" / "step-00000002"
    actor = restored(folder, step=2)
    path = actor._checkpoints.save(
        actor.receive(Capture()).write, step=3, weight_version=4, history=CheckpointHistory()
    )
    assert next_step(actor) == pytest.approx((LOSS, GRAD_NORM), rel=1e-5)
    expected = load_file(old / "master.safetensors")
    found = master_weights(path, adapters=False).read()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert next_step(restored(folder, step=3)) == pytest.approx((LOSS, GRAD_NORM), rel=1e-5)
