"""`routing_replay`: a step with recorded experts, and models that cannot replay any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.core.errors import ConfigError
from forge.rl.config import RoutingReplayConfig
from forge.rl.learner.batch_plan import plan_batch
from services.trainer.actors.learner import DescribeRoutes
from services.trainer.learner.model_replica import Take
from tests.support.rl.forests import forest
from tests.support.rl.models import tiny_model
from tests.support.rl.routed import with_routes
from tests.support.trainer.learners import started_learner

REPLAY = RoutingReplayConfig(enabled=True, compare_every_steps=2)


def test_step_replays_the_experts_of_its_batch(tmp_path: Path) -> None:
    """The learner says which routes it replays; a step counts them, and every second one compares
    them with the model's own choice."""
    tiny_model("qwen3_moe", torch.float32).save_pretrained(tmp_path / "model")
    actor = started_learner(tmp_path / "model", tmp_path, routing_replay=REPLAY)
    shape = actor.receive(DescribeRoutes())
    assert (shape.layers, shape.top_k, shape.experts) == (2, 2, 4)
    plan = plan_batch(
        with_routes(forest("forked"), shape), token_budget=1 << 20, channels=32, route_shape=shape
    )
    for compared in (plan.trained_tokens, 0):
        stats = actor.receive(Take(plan=plan, weight_version=1)).replay
        assert stats.replayed == plan.tree_tokens - 1
        assert stats.compared == compared


def test_model_without_experts_is_refused(model_path: Path, tmp_path: Path) -> None:
    """In one line with the setting and the reason."""
    words = "routing_replay.enabled = True is not allowed for this model: .* has no routers"
    with pytest.raises(ConfigError, match=words):
        started_learner(model_path, tmp_path, routing_replay=REPLAY)
