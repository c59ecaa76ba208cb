"""Compiled layers: the same gradient, one compilation for every tree, refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from forge.core.errors import InvalidArgument
from forge.rl.config import LearnerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model import compiled
from forge.rl.model.compiled import compile_layers
from forge.rl.model.policy import TreePolicy
from tests.support.rl.forests import forest
from tests.support.rl.models import gradients, tiny_model


def gradient(learner: Learner, kind: str) -> torch.Tensor:
    learner.accumulate(learner.plan(forest(kind)))
    return torch.cat([one.flatten() for one in gradients(learner.policy.model).values()])


@pytest.mark.matrix
def test_compiled_layers_give_the_same_gradient_without_another_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graphs of one tree serve a tree of other nodes and another number of tokens."""

    @cache
    def traced(forward: Any) -> Any:
        return torch.compile(forward, dynamic=True, backend="eager")

    monkeypatch.setattr(compiled, "_compiled", traced)
    own, other = (
        Learner(
            TreePolicy(tiny_model("qwen3", torch.float32), autocast=torch.bfloat16), LearnerConfig()
        )
        for _ in "ab"
    )
    compile_layers(other.policy.model)
    graphs = []
    for kind in ("forked", "linear"):
        expected, found = gradient(own, kind), gradient(other, kind)
        assert float((found - expected).norm() / expected.norm()) <= 1e-6
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


@pytest.mark.parametrize(
    ("family", "reason"), [("qwen3_moe", "experts"), ("falcon_h1", "recurrent")]
)
def test_layers_that_do_more_than_a_graph_are_refused(family: str, reason: str) -> None:
    """Routers that replay a record, and states from node to node."""
    with pytest.raises(InvalidArgument, match=reason):
        compile_layers(tiny_model(family, torch.float32))
