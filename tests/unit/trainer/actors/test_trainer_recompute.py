"""`recompute_activations`: the same step, with layers computed again on the way back."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from forge.core.errors import ConfigError
from forge.rl.config import OptimizerConfig
from forge.rl.learner.batch_plan import plan_batch
from services.trainer.actors.learner import TakeSnapshot
from services.trainer.learner.model_replica import Take
from services.trainer.model import placement
from services.trainer.setting_tables import LoraSettings
from tests.support.rl.models import make_sample
from tests.support.trainer.learners import started_learner

LORA = {"lora": LoraSettings(rank=2, targets=("q_proj", "down_proj"))}


def after_a_step(
    model_path: Path, folder: Path, **settings: Any
) -> tuple[dict[str, torch.Tensor], int]:
    """The weights published then, and how often a layer was computed in it."""
    optimizer = OptimizerConfig(learning_rate=1e-2)
    actor = started_learner(model_path, folder, optimizer=optimizer, **settings)
    model = actor._replica._learner.policy.model
    assert not any(one.training for one in model.modules() if isinstance(one, torch.nn.Dropout))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.model.layers[0].mlp.register_forward_pre_hook(count)
    rng = Random(3)
    samples = [make_sample([1, 2, 3, n, n + 1, 5], (3, 6), rng=rng) for n in range(4)]
    plan = plan_batch(samples, token_budget=8, channels=32)
    assert actor.receive(Take(plan=plan, weight_version=1)).skipped == ""
    sent = actor.receive(TakeSnapshot(step=1)).tensors
    return {
        one.name: torch.frombuffer(bytearray(one.data), dtype=torch.float32) for one in sent
    }, calls


@pytest.mark.parametrize("lora", [{}, LORA], ids=["all weights", "adapters"])
def test_recomputed_layers_give_the_same_step(
    lora: dict[str, Any], model_path: Path, tmp_path: Path
) -> None:
    """Relayed trees, all weights or adapters only."""
    kept, once = after_a_step(model_path, tmp_path / "kept", **lora)
    again, twice = after_a_step(model_path, tmp_path / "again", recompute_activations=True, **lora)
    assert twice > once  # what runs without a gradient does not
    assert kept.keys() == again.keys()
    for name, tensor in kept.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-5, atol=1e-6)


def test_model_without_recompute_support_is_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line with the setting."""

    def cannot(model: Any, **_: Any) -> None:
        raise ValueError(f"{type(model).__name__} does not support it.")

    monkeypatch.setattr(placement, "recompute_activations", cannot)
    with pytest.raises(ConfigError, match="recompute_activations = true is not allowed"):
        started_learner(model_path, tmp_path, recompute_activations=True)


def test_compiled_layers_need_autocast(model_path: Path, tmp_path: Path) -> None:
    """A start without it ends in one line; with it compilation waits for the first tree."""
    with pytest.raises(ConfigError, match=r"compile_layers = true .* it needs autocast"):
        started_learner(model_path, tmp_path / "a", compile_layers=True, autocast="none")
    started_learner(model_path, tmp_path / "b", compile_layers=True, autocast="bfloat16")
