"""Compiled layers: the same gradient, one compilation for every tree, refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from forge.core.errors import InvalidArgument
from forge.rl.config import LearnerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model import compiled
from forge.rl.model.compiled import compile_layers
from forge.rl.model.policy import TreePolicy
from forge.rl.model.recomputation import recompute_activations
from forge.rl.parallel.sharding import layers_of
from tests.support.rl.forests import forest
from tests.support.rl.models import gradients, tiny_model


def gradient(learner: Learner, kind: str) -> torch.Tensor:
    learner.accumulate(learner.plan(forest(kind)))
    return torch.cat([one.flatten() for one in gradients(learner.policy.model).values()])


def traced() -> Callable[[Any], Any]:
    """Compiles to graphs that run as they were written; without those of earlier tests."""
    torch.compiler.reset()
    return cache(partial(torch.compile, dynamic=True, backend="eager"))


@pytest.mark.matrix
def test_compiled_layers_give_the_same_gradient_without_another_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graphs of one tree serve a tree of other nodes and another number of tokens."""
    monkeypatch.setattr(compiled, "_compiled", traced())
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


@pytest.mark.parametrize(("recomputed", "graphs"), [(False, 2), (True, 3)])
def test_layers_have_few_graphs_for_all_passes(
    monkeypatch: pytest.MonkeyPatch, recomputed: bool, graphs: int
) -> None:
    """One with and one without gradients, for one pass or parts with keys of earlier ones, and for
    a type that is derived from another one, as FSDP's are. With recomputed activations the first
    layer has a graph more, since transformers lets its input have a gradient in every pass."""

    class Derived(Qwen3DecoderLayer):  # type: ignore[misc]
        """Its forward has transformers' wrapper twice."""

    monkeypatch.setattr(compiled, "_compiled", traced())
    model = tiny_model("qwen3", torch.float32)
    for layer in layers_of(model):
        layer.__class__ = Derived
    if recomputed:
        recompute_activations(model)
    policy = TreePolicy(model, autocast=torch.bfloat16)
    learner = Learner(policy, LearnerConfig(token_budget=8))
    compile_layers(model)
    for kind in ("forked", "linear", "prefix"):
        plan = learner.plan(forest(kind))
        with torch.no_grad():
            for tree in plan.trees:
                policy.logprobs(tree)
        learner.accumulate(plan)
    own = compiled._own_forward(Derived)
    assert len(_debug_get_cache_entry_list(own.__code__)) == graphs
    assert own is compiled._own_forward(Qwen3DecoderLayer)
    assert not _debug_get_cache_entry_list(Derived.forward.__code__)


@pytest.mark.parametrize(
    ("family", "reason"), [("qwen3_moe", "experts"), ("falcon_h1", "recurrent")]
)
def test_layers_that_do_more_than_a_graph_are_refused(family: str, reason: str) -> None:
    """Routers that replay a record, and states from node to node."""
    with pytest.raises(InvalidArgument, match=reason):
        compile_layers(tiny_model(family, torch.float32))


def test_limit_of_graphs_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many code objects meet it."""
    monkeypatch.setattr(compiled, "_compiled", traced())
    monkeypatch.setattr(compiled._at_limit, "met", False)
    model = tiny_model("llama", torch.float32)
    policy = TreePolicy(model, autocast=torch.bfloat16)
    learner = Learner(policy, LearnerConfig())
    compile_layers(model)
    plan = learner.plan(forest("linear"))
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.WARNING):
        learner.accumulate(plan)
        with torch.no_grad():
            policy.logprobs(plan.trees[0])
    said = [one.getMessage() for one in caplog.records if one.name == compiled.__name__]
    assert len(said) == 1 and "no further graphs of a layer" in said[0]
