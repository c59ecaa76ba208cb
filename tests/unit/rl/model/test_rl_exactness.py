"""Tree-merged loss and gradients equal those of one sample at a time (invariant I5).

Every family of models, every shape of tree, every way of computing it: whole, split into several
trees, relayed in parts. `make properties` computes their whole product. Ranks are in
`test_rl_ranks.py`, random trees in `test_rl_exactness_forests.py`.
"""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from hypothesis import settings

from forge.core.prefix_tree import Sample
from forge.rl.attention import schedule as schedule_module
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.batch_plan import BatchPlan, plan_batch
from forge.rl.learner.learner import Learner
from forge.rl.model.forked_states import _NodeCache
from forge.rl.model.policy import TreePolicy
from forge.rl.model.recomputation import recompute_activations
from tests.support.rl.forests import KINDS, forest
from tests.support.rl.models import (
    CAP,
    Gradient,
    gradients,
    make_sample,
    reference_gradient,
    relative_errors,
    tiny_model,
    wide_norms,
)

pytestmark = pytest.mark.hypothesis

FUZZ = settings.get_current_profile_name() == "fuzz"
UNSPLIT = 1 << 30
DENSE = ("qwen3", "llama", "mistral", "gemma3")
EXPERTS = ("qwen3_moe", "mixtral")
FORMS = ("gemma2", "gpt_oss", "deepseek_v3")
"""Softcaps, sinks, values of another size than keys."""
RECURRENT = ("qwen3_next", "falcon_h1", "mamba")
"""States that nodes hand to their children."""
WAYS = ("whole", "split", "relayed")
CUT = ("forked", "compacted")
BALANCE = 0.1


@cache
def reference(family: str, dtype: torch.dtype, kind: str) -> Gradient:
    """Of a forest by name: the same for every way of computing it."""
    return reference_gradient(
        tiny_model(family, dtype), forest(kind), balance_coef=balance_of(family)
    )


def balance_of(family: str) -> float:
    return BALANCE if family in EXPERTS else 0.0


def planned(samples: list[Sample], cut: str | int, *, channels: int = 32) -> BatchPlan:
    """Cut in a way by name, or within a token budget in whichever way is cheaper."""
    match cut:
        case "whole":
            return plan_batch(samples, token_budget=UNSPLIT, channels=channels)
        case "split":  # 24 cut bushes into trees that still share, 13 what is one short chain
            for budget in (24, 13):
                plan = plan_batch(samples, token_budget=budget, channels=channels, relay=False)
                if len(plan.trees) > 1:
                    break
            return plan
        case "relayed":  # the shortest prompt is longer
            return plan_batch(samples, token_budget=5, channels=channels)
    assert isinstance(cut, int)
    return plan_batch(samples, token_budget=cut, channels=channels)


def errors(
    family: str, dtype: torch.dtype, samples: list[Sample], cut: str | int, expected: Gradient
) -> tuple[float, float]:
    """Relative error of loss and of gradients, against the stock attention."""
    model = tiny_model(family, dtype)
    config = LearnerConfig(objective=ObjectiveConfig(ratio_cap=CAP))
    policy = TreePolicy(model, balance_coef=balance_of(family))
    learner = Learner(policy, config)
    loss, _ = learner.accumulate(planned(samples, cut, channels=policy.channels))
    if policy.balance is not None:
        loss += policy.balance.value
    return relative_errors(Gradient(loss=loss, of=gradients(model)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_cuts_every_shape(kind: str) -> None:
    """Whole is one pass; split is several trees of a pass each, unless there is one sample alone;
    relayed is trees of several parts."""
    samples = forest(kind)
    parts = {way: [len(tree.parts) for tree in planned(samples, way).trees] for way in WAYS}
    assert parts["whole"] == [1]
    assert set(parts["split"]) == {1}
    assert (len(parts["split"]) > 1) == (len(samples) > 1)
    assert max(parts["relayed"]) > 1 and planned(samples, "relayed").largest_tree <= 5


FP64 = [
    (family, kind, way)
    for family in DENSE + EXPERTS + FORMS + RECURRENT
    for kind in KINDS
    for way in WAYS
    if FUZZ or family == "qwen3" or kind in CUT
]


@pytest.mark.parametrize(("family", "kind", "way"), FP64)
def test_merged_gradients_are_exact_in_fp64(family: str, kind: str, way: str) -> None:
    """Loss and every gradient agree to 1e-12, for any tree."""
    with wide_norms():
        expected = reference(family, torch.float64, kind)
        found = errors(family, torch.float64, forest(kind), way, expected)
    assert max(found) <= 1e-12


@pytest.mark.parametrize("family", RECURRENT)
def test_prompts_shorter_than_a_convolution_are_exact(family: str) -> None:
    """Two of different lengths in one pass: what follows each begins with a state of its own."""
    rng = Random(3)
    prompts = ([1], [2, 3])
    samples = [
        make_sample([*prompt, token, 5, 6], (len(prompt), len(prompt) + 3), rng=rng)
        for prompt in prompts
        for token in (7, 8)
    ]
    with wide_norms():
        expected = reference_gradient(tiny_model(family, torch.float64), samples)
        found = errors(family, torch.float64, samples, "whole", expected)
    assert max(found) <= 1e-12


# fp64 covers each shape in each way. fp32 has other kernels and the models' norms: each family in
# each way, over two shapes.
FP32 = [
    (family, kind, way)
    for family in DENSE + EXPERTS
    for kind in KINDS
    for way in WAYS
    if kind in CUT or (FUZZ and family == "qwen3")
]


@pytest.mark.parametrize(("family", "kind", "way"), FP32)
def test_merged_gradients_agree_to_rounding_in_fp32(family: str, kind: str, way: str) -> None:
    """In fp32, with transformers as it is, loss and gradients agree to 1e-5."""
    expected = reference(family, torch.float32, kind)
    assert max(errors(family, torch.float32, forest(kind), way, expected)) <= 1e-5


@pytest.mark.parametrize("schedule", ["one block", "chains", "short chains"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_is_exact(kind: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trees as a single masked block, and as chains and slabs only."""
    calls = 1e12 if schedule == "one block" else 0.0
    monkeypatch.setattr(schedule_module, "CALL_FLOPS", calls)
    if schedule == "short chains":
        monkeypatch.setattr(schedule_module, "CHAIN_TOKENS", 3)
    with wide_norms():
        expected = reference("qwen3", torch.float64, kind)
        found = errors("qwen3", torch.float64, forest(kind), "whole", expected)
    assert max(found) <= 1e-12


def test_recurrent_layers_of_earlier_releases_find_their_states() -> None:
    """transformers 5.17 reads them from the cache's entry of the layer."""
    conv, recurrent = torch.zeros(1), torch.ones(1)
    cache = _NodeCache({("conv", 0): conv, ("recurrent", 0): recurrent})
    own = cache.layers[3]
    assert own.conv_states[0] is conv and own.recurrent_states[0] is recurrent
    assert own.record_past, "a single token takes the path of several"


@pytest.mark.parametrize("family", ["llama4"])
def test_model_without_a_merged_way_is_not_merged(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is trained sequence by sequence, exactly, and one line says so."""
    samples = forest("think_stripped")
    expected = reference_gradient(tiny_model(family, torch.float32), samples)
    for budget in (UNSPLIT, 24):
        caplog.clear()
        found = errors(family, torch.float32, samples, budget, expected)
        assert max(found) <= 1e-5
        (record,) = [one for one in caplog.records if one.name == "forge.rl.model.capabilities"]
        assert "sequence by sequence" in record.getMessage()


@pytest.mark.parametrize(
    ("family", "share"), [("qwen3", 1.0), ("qwen3", 0.5), ("falcon_h1", 1.0), ("mamba", 1.0)]
)
@pytest.mark.parametrize("way", WAYS)
def test_gradient_checkpointing_changes_no_gradient(way: str, family: str, share: float) -> None:
    """Recomputed layers get the same tree, and the same keys and states of other parts."""
    samples = forest("forked")
    model = tiny_model(family, torch.float32)
    expected = reference_gradient(model, samples)
    recompute_activations(model, share=share)
    learner = Learner(TreePolicy(model), LearnerConfig(objective=ObjectiveConfig(ratio_cap=CAP)))
    loss, _ = learner.accumulate(planned(samples, way))
    actual = Gradient(loss=loss, of=gradients(model))
    assert max(relative_errors(actual, expected)) <= 1e-5


def test_bf16_autocast_stays_close() -> None:
    """A bf16 backbone under an fp32 head moves log-probs by no more than bf16 rounding."""
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
