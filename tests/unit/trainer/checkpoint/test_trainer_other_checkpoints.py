"""A checkpoint of another run ends the start with one line that names file and difference."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from forge.core.errors import ConfigError
from forge.rl.config import MtpConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.batch_plan import plan_batch
from services.trainer.actors.learner import Restore
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.learner.model_replica import Capture, Take
from services.trainer.setting_tables import LoraSettings
from tests.support.rl.models import make_sample, tiny_model
from tests.support.trainer.learners import started_learner


@pytest.fixture
def checkpoints(model_path: Path, tmp_path: Path) -> Path:
    """Of one step with AdamW, and heads."""
    actor = started_learner(model_path, tmp_path, mtp=MtpConfig(heads=1))
    samples = [make_sample([1, 2, 3, n], (3, 4), rng=Random(n)) for n in range(4)]
    plan = plan_batch(samples, token_budget=64, channels=32)
    assert not actor.receive(Take(plan=plan, weight_version=1)).skipped
    CheckpointStore(tmp_path).save(
        actor.receive(Capture()).write, step=1, weight_version=2, history=CheckpointHistory()
    )
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"optimizer": OptimizerConfig(name="muon")},
            r"learner.pt: optimizer.name = 'muon' cannot continue .* 'adamw'",
        ),
        (
            {"objective": ObjectiveConfig(algorithm="ppo")},
            r"learner.pt: objective.algorithm = 'ppo' cannot .* without a critic",
        ),
        ({"mtp": MtpConfig(heads=2)}, r"learner.pt: MTP heads do not fit: mtp\.1\."),
        ({"lora": LoraSettings(rank=2)}, r"has no adapter_model.safe.*: .* all weights trained"),
    ],
)
def test_checkpoint_of_other_settings_is_refused(
    model_path: Path, checkpoints: Path, settings: dict[str, Any], told: str
) -> None:
    """The line has the remedy, and the checkpoint stays."""
    with pytest.raises(ConfigError, match=rf"step-00000001.*{told}.*\. Give the run"):
        started_learner(model_path, checkpoints, **settings)
    assert started_learner(model_path, checkpoints).receive(Restore()).step == 1


def test_checkpoint_of_another_model_is_refused(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One tensor is named with both shapes."""
    path = tmp_path_factory.mktemp("other")
    tiny_model("llama", torch.float32).save_pretrained(path)
    with pytest.raises(
        ConfigError, match=r"model.safetensors is of another model .*: model\..* is"
    ):
        started_learner(path, checkpoints)


def test_checkpoint_of_a_newer_format_is_refused(model_path: Path, checkpoints: Path) -> None:
    """A fresh start beside a newer trainer's checkpoint would be no resume."""
    file = checkpoints / "step-00000001" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(
        ConfigError, match=r"state.json is of format 99; this trainer reads 1, 2 and 3"
    ):
        started_learner(model_path, checkpoints)


def test_unreadable_checkpoint_is_left_to_the_restore(model_path: Path, checkpoints: Path) -> None:
    """The restore sets it aside and uses the older one."""
    actor = started_learner(model_path, checkpoints)
    actor.receive(Restore())
    path = CheckpointStore(checkpoints).save(
        actor.receive(Capture()).write, step=2, weight_version=3, history=CheckpointHistory()
    )
    size = (path / "learner.pt").stat().st_size
    (path / "learner.pt").write_bytes(b"x" * size)
    assert started_learner(model_path, checkpoints).receive(Restore()).step == 1
