"""The estimate of memory that a trainer on GPUs logs at its start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from transformers import AutoConfig

from forge.rl.config import MeshShape, ObjectiveConfig
from services.trainer.config import TrainerConfig
from services.trainer.learner import expected_memory as module
from services.trainer.learner.expected_memory import (
    expected_memory,
    log_estimate,
    log_expected_memory,
)
from services.trainer.memory_plan import GIB, MemorySettings, estimate, size_of
from services.trainer.mesh import MeshSettings
from services.trainer.setting_tables import LoraSettings
from tests.support.rl.models import tiny_model


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    tiny_model("qwen3", torch.float32).save_pretrained(tmp_path)
    return {"model_path": str(tmp_path), "token_budget": 4096, "autocast": "bfloat16"}


def logged_by(config: TrainerConfig, *, device_gib: float) -> dict[str, Any]:
    with structlog.testing.capture_logs() as logged:
        log_estimate(config, device_bytes=device_gib * GIB)
    (line,) = logged
    return dict(line)


def test_estimate_is_that_of_the_plan(settings: dict[str, Any]) -> None:
    """For the mesh, and with the reference that the loss needs."""
    mesh = MeshSettings(dp_shard=2, tp=2)
    objective = ObjectiveConfig(kl_coef=0.1)
    config = TrainerConfig(**settings, ranks=4, mesh=mesh, objective=objective)
    about = AutoConfig.from_pretrained(settings["model_path"])
    size, other = (size_of(about, bfloat16=True, tp=2, frozen=one) for one in (False, True))
    run = MemorySettings(shape=MeshShape(dp_shard=2, tp=2), context=4096, frozen=(other,))
    assert expected_memory(config) == estimate(size, run)


def test_adapters_are_their_own_reference(settings: dict[str, Any]) -> None:
    """Unless another directory has it."""
    lora, objective = LoraSettings(rank=2), ObjectiveConfig(kl_coef=0.1)
    own, other = (
        TrainerConfig(**settings, lora=lora, objective=objective, reference_path=path)
        for path in ("", settings["model_path"] + "/.")
    )
    assert expected_memory(own).frozen == 0 < expected_memory(other).frozen


def test_too_little_memory_is_a_warning_with_advice(settings: dict[str, Any]) -> None:
    """A model that cannot be read ends no start."""
    fits, too_large = (logged_by(TrainerConfig(**settings), device_gib=gib) for gib in (80.0, 1e-6))
    assert fits["event"] == too_large["event"] == "memory_estimated"
    assert (fits["log_level"], too_large["log_level"]) == ("info", "warning")
    assert "advice" not in fits and "forge trainer plan" in too_large["advice"]
    assert 0 < fits["activations_gib"] <= fits["total_gib"] < fits["device_gib"] == 80.0
    missing = logged_by(TrainerConfig(model_path="/nowhere"), device_gib=80.0)
    assert missing["event"] == "memory_not_estimated"


@pytest.mark.parametrize(("device", "lines"), [("cpu", 0), ("cuda", 1)])
def test_gpus_alone_are_compared(
    settings: dict[str, Any], device: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is known."""
    monkeypatch.setattr(module, "device_of", lambda setting, rank: torch.device(setting, rank))
    about = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    with structlog.testing.capture_logs() as logged:
        log_expected_memory(TrainerConfig(**settings, device=device))
    assert len(logged) == lines
