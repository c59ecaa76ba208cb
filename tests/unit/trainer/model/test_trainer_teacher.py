"""The teacher of a trainer: loaded from its directory, and refused where it cannot teach."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forge.core.errors import ConfigError
from forge.rl.config import ObjectiveConfig
from forge.rl.learner.batch_plan import plan_batch
from services.trainer.learner.model_replica import Take
from tests.support.rl.models import SHAPE, make_sample, other_model, tiny_model
from tests.support.trainer.learners import started_learner

IDS = {"a": 0, "b": 1, "c": 2}


def saved(model: Any, path: Path, ids: dict[str, int]) -> Path:
    model.save_pretrained(path)
    added = [{"content": "<end>", "id": len(ids)}]
    tokenizer = {"model": {"vocab": ids}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def started(tmp_path: Path, teacher: Any, ids: dict[str, int]) -> Any:
    model = saved(tiny_model("qwen3", torch.float32), tmp_path / "model", IDS)
    return started_learner(
        model,
        tmp_path / "checkpoints",
        teacher_path=str(saved(teacher, tmp_path / "teacher", ids)),
        objective=ObjectiveConfig(teacher_coef=1.0, teacher_only=True),
    )


def test_trainer_steps_towards_the_teacher_of_its_directory(tmp_path: Path) -> None:
    """Rewards are all equal: a step without a teacher would change nothing."""
    actor = started(tmp_path, other_model(torch.float32), IDS)
    samples = [make_sample([1, 2, 3, n], (3, 4), rng=Random(n)) for n in range(4)]
    plan = plan_batch(samples, token_budget=64, channels=32)
    result = actor.receive(Take(plan=plan, weight_version=1))
    assert result.skipped == "" and result.grad_norm > 0
    assert result.stats.teacher_kl != 0.0


def test_teacher_with_other_ids_is_refused(tmp_path: Path) -> None:
    """In one line with the setting and both directories."""
    with pytest.raises(ConfigError, match=r"teacher_path = .*teacher' .*ids .*model_path = ") as no:
        started(tmp_path, other_model(torch.float32), {"b": 0, "a": 1, "c": 2})
    assert "\n" not in str(no.value)


def test_teacher_with_more_ids_is_allowed(tmp_path: Path) -> None:
    """A larger model of a family may have a padded vocabulary."""
    larger = LlamaForCausalLM(LlamaConfig(**(SHAPE | {"vocab_size": 16})))
    assert started(tmp_path, larger, IDS)


def test_teacher_with_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    """It has no log-prob of some of the policy's tokens."""
    smaller = LlamaForCausalLM(LlamaConfig(**(SHAPE | {"vocab_size": 12})))
    with pytest.raises(ConfigError, match=r"vocabulary has 12 tokens, .*13"):
        started(tmp_path, smaller, IDS)
