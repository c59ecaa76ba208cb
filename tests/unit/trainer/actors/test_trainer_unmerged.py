"""A model whose prefixes cannot be merged, as only its own forward tells, in a whole trainer."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from forge.rl.config import ObjectiveConfig
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.learner.types import StepResult
from services.trainer.actors.learner import LearnerActor, Restore
from services.trainer.learner.model_replica import Take
from tests.support.rl.models import SHAPE, make_sample
from tests.support.trainer.learners import started_learner


@pytest.fixture
def soft_capped(tmp_path: Path) -> Path:
    """Its attention scores are, which merged trees do not do."""
    torch.manual_seed(0)
    shape = Gemma2Config(**SHAPE, head_dim=8, pad_token_id=0)
    Gemma2ForCausalLM(shape).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def step(actor: LearnerActor) -> StepResult:
    samples = [make_sample([1, 2, 3, n, n], (2, 5), rng=Random(n)) for n in range(4)]
    plan = plan_batch(samples, token_budget=64, channels=32)
    result: StepResult = actor.receive(Take(plan=plan, weight_version=1))
    assert not result.skipped
    return result


def test_reference_of_an_unmerged_model_is_not_merged(soft_capped: Path, tmp_path: Path) -> None:
    """With the same weights their distance is 0."""
    actor = started_learner(soft_capped, tmp_path, objective=ObjectiveConfig(kl_coef=0.1))
    assert step(actor).stats.reference_kl == pytest.approx(0.0, abs=1e-6)


def test_reference_stays_unmerged_after_a_restart_without_checkpoint(
    soft_capped: Path, tmp_path: Path
) -> None:
    """The first step again is the first step."""
    actor = started_learner(soft_capped, tmp_path)
    first = step(actor)
    assert actor.receive(Restore()) is None
    assert step(actor).loss == first.loss
