"""Tree-merged loss and gradients equal those of one sample at a time (invariant I5)."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.packing import Sample
from forge.rl import attention_schedule
from forge.rl.learner import Learner, LearnerConfig
from forge.rl.losses import ObjectiveConfig
from forge.rl.policy import TreePolicy
from tests.support.rl_models import (
    CAP,
    VOCABULARY,
    Gradient,
    gradients,
    make_sample,
    reference_gradient,
    relative_errors,
    tiny_model,
    wide_norms,
)

UNSPLIT = 1 << 30


def forest(kind: str) -> list[Sample]:
    """Samples whose tree has the shape named."""
    rng = Random(7)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    system, task, other = ids(9), ids(5), ids(4)
    if kind == "linear":  # every turn extends the last one
        turns = [system + task]
        for _ in range(3):
            turns.append(turns[-1] + ids(6))
        return [make_sample(one, (len(one) - 3, len(one)), rng=rng) for one in turns[1:]]
    if kind == "forked":  # a group, of which one member rewrites its history
        leaves = [system + task + ids(count) for count in (4, 7, 1, 5)]
        leaves += [system + other + ids(6), leaves[0][:16] + ids(8)]
        return [make_sample(one, (len(one) - 1, len(one)), rng=rng) for one in leaves]
    if kind == "think_stripped":  # what was sampled is trained, then dropped from the context
        history, samples = system + task, []
        for _ in range(4):
            thought, answer = ids(5), ids(3)
            turn = history + thought + answer
            samples.append(make_sample(turn, (len(history), len(turn)), rng=rng))
            history = history + answer + ids(2)
        return samples
    if kind == "duplicate":  # the same tokens with different advantages
        one = system + task + ids(4)
        return [make_sample(one, (14, 18), rng=rng) for _ in range(3)]
    if kind == "prefix":  # samples that end inside another one's chain
        one = system + task + ids(6)
        return [make_sample(one[:end], (end - 2, end), rng=rng) for end in (12, 15, 20)]
    if kind == "single_token":  # one-token answers under one prompt, and a two-token sample
        samples = [make_sample([*system, token], (9, 10), rng=rng) for token in range(6)]
        return [*samples, make_sample([1, 2], (1, 2), rng=rng)]
    if kind == "temperatures":  # one edge, sampled at two temperatures
        one = system + task
        return [make_sample(one, (10, 14), rng=rng, temperature=heat) for heat in (1.0, 0.5, 0.5)]
    assert kind == "roots"  # nothing shared at all
    return [make_sample([token, *ids(7)], (1, 4), (6, 8), rng=rng) for token in range(VOCABULARY)]


KINDS = (
    "linear",
    "forked",
    "think_stripped",
    "duplicate",
    "prefix",
    "single_token",
    "temperatures",
    "roots",
)


def errors(model: torch.nn.Module, samples: list[Sample], budget: int) -> tuple[float, float]:
    """Relative error of loss and of gradients, against the stock attention."""
    expected = reference_gradient(model, samples)
    config = LearnerConfig(token_budget=budget, objective=ObjectiveConfig(ratio_cap=CAP))
    learner = Learner(TreePolicy(model), config)
    loss, _ = learner.accumulate(learner.plan(samples))
    return relative_errors(Gradient(loss=loss, of=gradients(model)), expected)


@pytest.fixture(params=["as planned", "one block", "chains", "short chains"])
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trees as masked blocks, as a single one, and as chains and slabs alone."""
    if request.param == "one block":
        monkeypatch.setattr(attention_schedule, "CALL_FLOPS", 1e12)
    if "chains" in request.param:
        monkeypatch.setattr(attention_schedule, "CALL_FLOPS", 0.0)
    if "short" in request.param:
        monkeypatch.setattr(attention_schedule, "CHAIN_TOKENS", 3)


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize("budget", [UNSPLIT, 24])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_fp64_is_exact(family: str, kind: str, budget: int) -> None:
    """In fp64, loss and every gradient agree to 1e-12, whatever the tree and its schedule."""
    with wide_norms():
        loss_error, gradient_error = errors(tiny_model(family, torch.float64), forest(kind), budget)
    assert loss_error <= 1e-12
    assert gradient_error <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_fp32_is_exact_to_rounding(family: str, kind: str) -> None:
    """In fp32, with transformers as it is, loss and gradients agree to 1e-5."""
    loss_error, gradient_error = errors(tiny_model(family, torch.float32), forest(kind), UNSPLIT)
    assert loss_error <= 1e-5
    assert gradient_error <= 1e-5


@st.composite
def random_forests(draw: st.DrawFn) -> list[Sample]:
    """Samples over three tokens, so that they share prefixes of every length."""
    rng = Random(draw(st.integers(0, 1 << 30)))
    samples = []
    for ids in draw(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=10), min_size=1)):
        cut = sorted(rng.sample(range(1, len(ids) + 1), 2)) if len(ids) > 2 else [1, 2]
        samples.append(make_sample(ids, (cut[0], cut[1]), rng=rng))
    return samples


@settings(max_examples=150, deadline=None)
@given(random_forests(), st.sampled_from([UNSPLIT, 12]), st.sampled_from([0.0, 6e6]))
def test_any_tree_is_exact(samples: list[Sample], budget: int, call_flops: float) -> None:
    """In fp64, on random forests: no shape of tree or split changes the gradient."""
    with wide_norms(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_schedule, "CALL_FLOPS", call_flops)
        loss_error, gradient_error = errors(tiny_model("qwen3", torch.float64), samples, budget)
    assert loss_error <= 1e-12
    assert gradient_error <= 1e-12


def test_gradient_checkpointing_changes_nothing() -> None:
    """Recomputed layers see the same tree."""
    samples = forest("forked")
    model = tiny_model("qwen3", torch.float32)
    expected = reference_gradient(model, samples)
    model.activation_checkpointing_enable()
    model.train()
    config = LearnerConfig(objective=ObjectiveConfig(ratio_cap=CAP))
    learner = Learner(TreePolicy(model), config)
    loss, _ = learner.accumulate(learner.plan(samples))
    actual = Gradient(loss=loss, of=gradients(model))
    assert max(relative_errors(actual, expected)) <= 1e-5


def test_bf16_autocast_stays_close() -> None:
    """A bf16 trunk under an fp32 head moves log-probs by no more than bf16 rounding."""
    samples = forest("forked")
    model = tiny_model("qwen3", torch.float32)
    logprobs = []
    for autocast in (None, torch.bfloat16):
        policy = TreePolicy(model, autocast=autocast)
        (tree,) = Learner(policy, LearnerConfig()).plan(samples).trees
        logprobs_T, _ = policy.logprobs(tree)
        assert logprobs_T.dtype == torch.float32
        logprobs.append(logprobs_T.detach())
    assert float((logprobs[0] - logprobs[1]).abs().max()) < 0.1
