"""What only a CUDA device can show. Skipped where there is none.

    OMP_NUM_THREADS=1 python -m pytest --noconftest tests/gpu

needs torch, transformers, pytest and pytest-timeout, nothing of the services.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.core.prefix_tree import Sample, plan_trees
from forge.rl.attention.kernels import Form
from forge.rl.attention.schedule import AttentionSchedule
from forge.rl.attention.tree_attention import tree_attention
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import check_policy
from forge.rl.tree.batch import build_tree_batch
from forge.rl.tree.parts import cut_part
from tests.support.rl.models import CAP, Gradient, gradients, make_sample, relative_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
VOCABULARY = 512


def model_of(device: str, *, head_dim: int = 64, heads: int = 4) -> Any:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=head_dim,
    )
    return Qwen3ForCausalLM(shape).to(device)


def forest() -> list[Sample]:
    """A backbone of 300 tokens with branches of up to 200."""
    rng = Random(5)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    backbone = ids(300)
    leaves = [backbone + ids(200), backbone + ids(40), backbone[:100] + ids(150)]
    return [make_sample(one, (len(one) - 30, len(one)), rng=rng) for one in leaves]


def schedule_of(start: int) -> AttentionSchedule:
    samples = forest()
    (plan,) = plan_trees(samples, token_budget=1 << 30)
    batch = build_tree_batch(plan, samples, channels=256)
    return cut_part(batch.layout, (start, batch.tokens)).schedule


def gradient_on(device: str, *, budget: int, autocast: torch.dtype | None) -> Gradient:
    model = model_of(device)
    policy = TreePolicy(model, autocast=autocast)
    config = LearnerConfig(token_budget=budget, objective=ObjectiveConfig(ratio_cap=CAP))
    learner = Learner(policy, config)
    loss, _ = learner.accumulate(learner.plan(forest()))
    of = {name: gradient.cpu() for name, gradient in gradients(model).items()}
    scale = {name: float(gradient.norm()) for name, gradient in of.items()}
    return Gradient(loss=loss, of=of, loss_scale=abs(loss), scale=scale)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("start", [0, 350, 650])
@pytest.mark.parametrize(("heads", "size"), [(4, 64), (16, 128), (4, 192), (4, 512)])
def test_flex_attention_and_its_backward_equal_dense_calls(
    heads: int, size: int, start: int, window: int | None
) -> None:
    """Compiled, in fp32, with a prefix and without, of one block of queries and of several, against
    the CPU's calls in fp64."""
    schedule = schedule_of(start)
    torch.manual_seed(0)
    own = schedule.tokens - schedule.prefix
    host = [
        torch.randn(1, heads, tokens, size, dtype=torch.float64, requires_grad=True)
        for heads, tokens in ((heads, own), (2, schedule.tokens), (2, schedule.tokens))
    ]
    device = [x.detach().float().cuda().requires_grad_() for x in host]
    query, key, value = host
    expected = tree_attention(query, key, value, schedule, Form(scale=0.125, window=window))
    query, key, value = device
    found = tree_attention(query, key, value, schedule, Form(scale=0.125, window=window))
    expected.sin().sum().backward()
    found.sin().sum().backward()
    assert torch.allclose(found.double().cpu(), expected, rtol=1e-3, atol=1e-4)
    for mine, other in zip(device, host, strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.allclose(mine.grad.double().cpu(), other.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("budget", [1 << 30, 200])
def test_step_on_a_gpu_equals_one_on_a_cpu(budget: int) -> None:
    """Whole and relayed, in fp32: loss and every gradient."""
    expected = gradient_on("cpu", budget=1 << 30, autocast=None)
    found = gradient_on("cuda", budget=budget, autocast=None)
    assert max(relative_errors(found, expected)) <= 1e-3


def test_bf16_with_an_fp32_head_stays_close() -> None:
    """A bf16 backbone moves gradients by bf16 rounding, and logits are never all held."""
    expected = gradient_on("cpu", budget=1 << 30, autocast=None)
    found = gradient_on("cuda", budget=1 << 30, autocast=torch.bfloat16)
    assert max(relative_errors(found, expected)) <= 0.1


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_model_with_grouped_heads_is_merged_and_trained(autocast: torch.dtype | None) -> None:
    """The heads of Qwen 3: the check of a few tokens passes, and a relayed tree is trained, at the
    learning rate and with the statistics of a CPU."""
    results = []
    for device in ("cpu", "cuda"):
        policy = TreePolicy(model_of(device, head_dim=128, heads=16), autocast=autocast)
        check_policy(policy)
        assert not policy.unmerged
        learner = Learner(policy, LearnerConfig(token_budget=200))
        result = learner.step(learner.plan(forest()), weight_version=4)
        assert not result.skipped and not result.memory_retries
        results.append(result)
    host, device_result = results
    assert device_result.grad_norm == pytest.approx(host.grad_norm, rel=0.05)
    assert device_result.stats.entropy == pytest.approx(host.stats.entropy, rel=0.01)


def test_pass_beyond_gpu_memory_is_cut_smaller() -> None:
    """The allocator's own error: the gradient is that of the whole tree, in smaller passes."""
    rng = Random(7)
    ids = [rng.randrange(VOCABULARY) for _ in range(16_000)]
    samples = [make_sample(ids, (15_000, 16_000), rng=rng)]
    learner = Learner(TreePolicy(model_of("cuda")), LearnerConfig(token_budget=1 << 30))
    plan = learner.plan(samples)
    learner.accumulate(plan)  # what libraries allocate once
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    loss, _ = learner.accumulate(plan)
    limit = before + (torch.cuda.max_memory_reserved() - before) * 3 // 4
    torch.cuda.empty_cache()
    try:
        device_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / device_bytes)
        result = learner.step(plan, weight_version=4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.memory_retries and not result.skipped
    assert result.loss == pytest.approx(loss, rel=1e-3)
