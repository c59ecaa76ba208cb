"""The estimate of a rank's memory, against what a small model takes."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.rl.config import LearnerConfig, MeshShape, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.out_of_memory import recompute_activations
from services.trainer import plan
from services.trainer.memory_plan import Run, estimate, fitting, size_of
from tests.support.rl.models import make_sample

TOKENS = 768
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def peak_bytes(step: Any) -> int:
    """Largest sum of live allocations during a call, beyond those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    now = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize(("recompute", "frozen"), [(False, 0), (True, 0), (True, 2)])
def test_estimate_is_close_to_the_measured_peak(recompute: bool, frozen: int) -> None:
    """Of a whole step, in float32, with and without a reference and a teacher: between the peak and
    a third more."""
    config = Qwen3Config(**SHAPE)
    model: Any = Qwen3ForCausalLM(config).eval()
    if recompute:
        recompute_activations(model)
    coef = 0.1 if frozen else 0.0
    learner = Learner(
        TreePolicy(model),
        LearnerConfig(
            token_budget=TOKENS, objective=ObjectiveConfig(kl_coef=coef, teacher_coef=coef)
        ),
        reference=frozen_policy(config) if frozen else None,
        teacher=frozen_policy(config) if frozen else None,
    )
    rng = Random(0)
    sample = make_sample([rng.randrange(1024) for _ in range(TOKENS)], (1, TOKENS), rng=rng)
    batch = learner.plan([sample])
    learner.step(batch, weight_version=1)  # allocates the moments
    second = peak_bytes(lambda: learner.step(batch, weight_version=1))
    weights = sum(one.numel() * 4 for one in model.parameters())
    size = size_of(config, bfloat16=False)
    run = Run(
        shape=MeshShape(),
        context=TOKENS,
        bfloat16=False,
        recompute=recompute,
        frozen=(size,) * frozen,
    )
    found = estimate(size, run)
    assert found.weights == weights
    # Weights, moments and frozen models; the step allocates the rest.
    measured = (3 + frozen) * weights + second
    print(f"measured {measured}, estimated {found.total:.0f}")
    assert measured <= found.total <= measured * 1.33


def frozen_policy(config: Qwen3Config) -> TreePolicy:
    return TreePolicy(Qwen3ForCausalLM(config).eval().requires_grad_(False))


def test_shards_divide_what_they_hold() -> None:
    """Weights, gradients and optimizer fall with dp_shard times cp, activations with cp."""
    size = size_of(Qwen3Config(**SHAPE), bfloat16=True)
    one = estimate(size, Run(shape=MeshShape(), context=4096))
    four = estimate(size, Run(shape=MeshShape(dp_shard=2, cp=2), context=4096))
    assert four.weights == one.weights / 4 and four.optimizer == one.optimizer / 4
    assert four.activations == one.activations / 2
    shape = MeshShape(dp_shard=2, cp=2)
    teacher = estimate(size, Run(shape=shape, context=4096, frozen=(size,)))
    assert teacher.total - four.total == teacher.frozen > four.weights


def test_nearest_settings_that_fit_are_found() -> None:
    """Shards first, then recomputed activations, then ranks of a tree; None if nothing fits."""
    size = size_of(Qwen3Config(**SHAPE), bfloat16=True)
    run = Run(shape=MeshShape(dp_shard=8), context=1 << 16)
    assert fitting(size, run, device_bytes=estimate(size, run).total) == run
    less = fitting(size, run, device_bytes=estimate(size, run).total * 0.6)
    assert less is not None and less.recompute and less.shape.cp == 1
    assert fitting(size, run, device_bytes=1.0) is None


def test_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part, whether it fits, and what to change; a bad mesh is one line and exit code 2."""
    Qwen3Config(**SHAPE).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--world", "2", "--context", "8192", "--device-gib"]
    assert plan.main([*arguments, "4"]) == 0
    fits = capsys.readouterr().out
    assert "fits: " in fits and "activations" in fits
    teacher = tmp_path / "teacher"
    Qwen3Config(**SHAPE | {"vocab_size": 1 << 18}).save_pretrained(teacher)
    assert re.search(r"frozen +0\.00", fits)
    assert plan.main([*arguments, "4", "--teacher", str(teacher)]) == 0
    # Half of its weights, and its embedding and head whole.
    assert re.search(r"frozen +0\.38", capsys.readouterr().out)
    assert plan.main([*arguments, "4", "--reference", str(tmp_path / "none")]) == 2
    assert "--reference" in capsys.readouterr().err
    assert plan.main([*arguments, "0.2"]) == 0
    assert "change: 2 ranks, mesh.dp_shard = 2" in capsys.readouterr().out
    assert plan.main([*arguments, "4", "--dp-shard", "3"]) == 2
    assert "mesh.dp_shard = 3" in capsys.readouterr().err
