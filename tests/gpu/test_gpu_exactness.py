"""Merged trees on a CUDA device equal single samples, for every form of attention and layer.

The reference is one sample at a time in fp64 on the CPU, through the model's stock attention. The
device computes in fp32 with FlexAttention; trees have several of its blocks. With TF32 products the
errors would exceed the tolerance: one test shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch

from forge.core.prefix_tree import Sample
from forge.core.routes import RouteShape
from forge.rl.config import LearnerConfig, MtpConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.compiled import compile_layers
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import as_sample, own_logprobs
from forge.rl.model.recomputation import recompute_activations
from forge.rl.model.wide_products import PartProducts, products_of
from tests.support.rl.models import (
    CAP,
    VOCABULARY,
    Gradient,
    gradients,
    make_sample,
    reference_gradient,
    relative_errors,
    tiny_model,
)
from tests.support.rl.routed import routers_by_hand, with_routes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
Record = Callable[[str, object], None]
FAMILIES = (
    *("qwen3", "llama", "mistral", "gemma3", "gemma2", "gpt_oss", "deepseek_v3"),
    *("qwen3_moe", "mixtral", "qwen3_next", "falcon_h1", "minimax"),
)
"""Dense, windows, soft-caps, sinks, values of another size, experts, recurrent layers."""
EXPERTS = ("gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral", "qwen3_next", "minimax")
OWN = {"gemma2": "eager", "gpt_oss": "eager"}
"""SDPA has no caps and no sinks."""
WAYS = {"whole": 1 << 30, "relayed": 200}
"""Tokens of a pass."""
TOLERANCE = 3e-5
"""The largest error on an H100 was 1.9e-5, of Qwen3-Next, and 2.8e-6 of all others."""
ROUTES = RouteShape(layers=2, top_k=2, experts=4)


@cache
def samples() -> list[Sample]:
    """A tree of 580 tokens with nested forks, a sample that ends in a chain, one edge with two
    advantages, and two temperatures."""
    rng = Random(11)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    backbone = ids(200)
    first = backbone + ids(150)
    leaves = [first, first, first[:300], first[:260] + ids(70), backbone + ids(40)]
    leaves.append(backbone[:90] + ids(120))
    found = [make_sample(one, (60, 80), (len(one) - 30, len(one)), rng=rng) for one in leaves]
    return [*found, make_sample(first, (180, 230), rng=rng, temperature=0.7)]


@cache
def reference(family: str, *, routed: bool = False) -> Gradient:
    """Of single samples; with `routed`, through the recorded experts."""
    model = tiny_model(family, torch.float64, wide=True)
    model.set_attn_implementation(OWN.get(family, "sdpa"))
    batch = with_routes(samples(), ROUTES) if routed else samples()
    if not routed:
        return reference_gradient(model, batch)
    with routers_by_hand(model, batch):
        return reference_gradient(model, batch)


def device_learner(
    family: str, budget: int, *, autocast: torch.dtype | None = None, recomputed: bool = False,
    **settings: Any,
) -> Learner:  # fmt: skip
    model = tiny_model(family, torch.float32, wide=True).cuda()
    if autocast is not None and family in EXPERTS:
        model.set_experts_implementation("grouped_mm")  # the default on a GPU
    if recomputed:
        recompute_activations(model)
    policy = TreePolicy(model, autocast=autocast)
    assert not policy.unmerged
    objective = ObjectiveConfig(ratio_cap=CAP)
    return Learner(policy, LearnerConfig(token_budget=budget, objective=objective, **settings))


def device_gradient(learner: Learner, batch: list[Sample]) -> Gradient:
    plan = learner.plan(batch)
    assert plan.tree_tokens < plan.sample_tokens
    loss, _ = learner.accumulate(plan)
    of = {name: one.double().cpu() for name, one in gradients(learner.policy.model).items()}
    return Gradient(loss=loss, of=of)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_gradients_equal_single_samples_in_fp32(
    family: str, way: str, record_property: Record
) -> None:
    """Loss and every gradient, of a tree in one pass and in relayed ones."""
    learner = device_learner(family, WAYS[way])
    errors = relative_errors(device_gradient(learner, samples()), reference(family))
    record_property("errors", errors)
    assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("family", ["gpt_oss", "falcon_h1"])
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_activations_change_no_gradient(
    family: str, way: str, record_property: Record
) -> None:
    """Layers that run again get the same tree, keys and states."""
    learner = device_learner(family, WAYS[way], recomputed=True)
    errors = relative_errors(device_gradient(learner, samples()), reference(family))
    record_property("errors", errors)
    assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_backbone_stays_close(family: str, record_property: Record) -> None:
    """Under autocast log-probs differ from fp64 by bf16 rounding, experts in grouped products."""
    learner = device_learner(family, WAYS["whole"], autocast=torch.bfloat16)
    model = tiny_model(family, torch.float64, wide=True)
    model.set_attn_implementation(OWN.get(family, "sdpa"))
    one = samples()[3]
    with torch.no_grad():
        expected = own_logprobs(model, one)[-30:]
    plan = learner.plan([one])
    logprobs_T, _ = learner.policy.logprobs(plan.trees[0])
    assert logprobs_T.dtype == torch.float32
    logprobs_T.sum().backward()
    assert all(bool(each.isfinite().all()) for each in gradients(learner.policy.model).values())
    error = float((logprobs_T.detach()[-30:].double().cpu() - expected).abs().mean())
    record_property("errors", error)
    assert error <= 0.05


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "gemma2"])
def test_compiled_layers_are_as_exact_as_their_own(
    family: str, way: str, record_property: Record
) -> None:
    """Both round to bfloat16, at other places: errors against fp64 are of one size."""
    found = []
    for compiled in (False, True):
        learner = device_learner(family, WAYS[way], autocast=torch.bfloat16)
        if compiled:
            compile_layers(learner.policy.model)
        errors = relative_errors(device_gradient(learner, samples()), reference(family))
        found.append(max(errors))
    own, error = found
    record_property("errors", found)
    assert error <= 2 * own  # 1.04 to 1.38 on an H100


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_replayed_experts_equal_routers_written_out(
    family: str, way: str, autocast: torch.dtype | None, record_property: Record
) -> None:
    """With recorded experts bf16 changes no choice of one, so that gradients stay close to fp64."""
    learner = device_learner(family, WAYS[way], autocast=autocast)
    model = learner.policy.model
    learner.policy.replay_routes(partial(own_logprobs, model, as_sample([1, 2, 3, 4])))
    assert learner.policy.replay is not None and learner.policy.replay.shape == ROUTES
    found = device_gradient(learner, with_routes(samples(), ROUTES))
    errors = relative_errors(found, reference(family, routed=True))
    record_property("errors", errors)
    assert max(errors) <= (TOLERANCE if autocast is None else 0.05)


@pytest.mark.parametrize("way", WAYS)
def test_draft_heads_learn_the_same_on_a_gpu(way: str, record_property: Record) -> None:
    """Loss, acceptance and gradients of the heads equal those of a CPU."""
    results = []
    for device in ("cpu", "cuda"):
        model = tiny_model("qwen3", torch.float32, wide=True).to(device)
        torch.manual_seed(3)
        config = LearnerConfig(token_budget=WAYS[way], mtp=MtpConfig(heads=2, top_k=4))
        learner = Learner(TreePolicy(model), config)
        learner.accumulate(learner.plan(samples()))
        assert learner.mtp is not None
        grads = torch.cat([one.cpu().flatten() for one in gradients(learner.mtp.heads).values()])
        results.append((learner.mtp.stats(), grads))
    (host, host_grads), (device_stats, device_grads) = results
    error = float((device_grads - host_grads).norm() / host_grads.norm())
    record_property("errors", error)
    assert device_stats.losses == pytest.approx(host.losses, rel=1e-5)
    assert device_stats.acceptance == pytest.approx(host.acceptance, rel=1e-5)
    assert error <= 1e-4


def test_tf32_is_off_and_its_errors_would_be_seen(record_property: Record) -> None:
    """fp32 products are IEEE's unless something allows TF32; then the tolerance is exceeded."""
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    with tf32():
        found = device_gradient(device_learner("qwen3", WAYS["whole"]), samples())
    errors = relative_errors(found, reference("qwen3"))
    record_property("errors", errors)
    assert max(errors) > TOLERANCE


@contextmanager
def tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("published", [True, False])
def test_head_in_bf16_parts_is_as_exact_as_fp32(published: bool, record_property: Record) -> None:
    """Logits of the tensor cores' bf16 products, added in fp32, against fp64."""
    torch.manual_seed(0)
    states_rC = 3 * torch.randn(300, 1024, device="cuda")
    weight_VC = torch.randn(5000, 1024, device="cuda") / 50
    weight_VC = weight_VC.bfloat16().float() if published else weight_VC
    products = products_of(weight_VC, backbone=torch.bfloat16)
    assert isinstance(products, PartProducts)
    expected = states_rC.double() @ weight_VC.double().T
    error = float((products.logits(states_rC).double() - expected).norm() / expected.norm())
    record_property("errors", error)
    assert error <= 5e-6
