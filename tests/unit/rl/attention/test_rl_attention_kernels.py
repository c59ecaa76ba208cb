"""Every kernel that trees are computed with computes the same."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention as flex_kernel

from forge.core.prefix_tree import plan_trees
from forge.rl.attention import flex, kernels, tree_attention
from forge.rl.attention.flex import flex_tree_attention
from forge.rl.attention.kernels import Form, Portable
from forge.rl.attention.schedule import AttentionSchedule
from forge.rl.tree.batch import build_tree_batch
from forge.rl.tree.parts import cut_part
from tests.support.rl.models import make_sample

WINDOWS = [None, 70]


def schedule_of(*, start: int = 0) -> AttentionSchedule:
    """Some 600 tokens: a backbone, branches at several depths, a bush of short answers."""
    rng = Random(5)

    def ids(count: int) -> list[int]:
        return [rng.randrange(50) for _ in range(count)]

    backbone, branch = ids(140), ids(90)
    leaves = [backbone + branch + ids(110), backbone + branch + ids(37), backbone[:60] + ids(130)]
    leaves += [[*backbone, token, token] for token in range(12)]
    samples = [make_sample(one, (1, len(one)), rng=rng) for one in leaves]
    (plan,) = plan_trees(samples, token_budget=1 << 30)
    batch = build_tree_batch(plan, samples, channels=64)
    return cut_part(batch.layout, (start, batch.tokens)).schedule


def inputs(schedule: AttentionSchedule) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    own = schedule.tokens - schedule.prefix
    q = torch.randn(1, 4, own, 16, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(1, 2, schedule.tokens, 16, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    return q, k, v


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("start", [0, 200])
def test_portable_kernel_equals_the_cpu_kernel(
    start: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward in fp64, with grouped heads, masks, and chunks of queries."""
    schedule = schedule_of(start=start)
    found = []
    for portable in (False, True):
        if portable:
            monkeypatch.setattr(kernels, "CHUNK_SCORES", 5000)
            monkeypatch.setattr(tree_attention, "kernel_for", lambda _, softcap: Portable())
        q, k, v = inputs(schedule)
        out = tree_attention.tree_attention(q, k, v, schedule, Form(scale=0.3, window=window))
        out.sin().sum().backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for own, other in zip(*found, strict=True):
        assert own is not None and other is not None
        assert torch.allclose(own, other, rtol=1e-12, atol=1e-12)


def one_softmax(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, schedule: AttentionSchedule, form: Form
) -> Tensor:
    """The definition: all pairs at once."""
    keys, queries = torch.arange(schedule.tokens), torch.arange(schedule.prefix, schedule.tokens)
    seen = (keys <= queries[:, None]) & (queries[:, None] < schedule.ends_K)
    if form.window is not None:
        places = schedule.positions_K
        seen &= places[queries][:, None] - places < form.window
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * form.scale
    if form.softcap:
        scores = (scores / form.softcap).tanh() * form.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    sinks = sinks_H[None, :, None, None].expand(*scores.shape[:3], 1)
    probs = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return probs @ v.repeat_interleave(2, dim=1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("start", [0, 200])
@pytest.mark.parametrize(("size", "softcap"), [(16, 0.7), (10, 0.0), (22, 0.7)])
def test_softcaps_sinks_and_sizes_of_values_are_exact(
    size: int, softcap: float, start: int, window: int | None
) -> None:
    """Output and all gradients, those of the sinks too, equal one softmax over all pairs."""
    schedule, form = schedule_of(start=start), Form(scale=0.3, window=window, softcap=softcap)
    q, k, _ = inputs(schedule)
    v = torch.randn(1, 2, schedule.tokens, size, dtype=torch.float64, requires_grad=True)
    sinks_H = torch.tensor([-2.0, 0.0, 1.5, 4.0], dtype=torch.float64, requires_grad=True)
    roots = [q, k, v, sinks_H]
    found = tree_attention.tree_attention(q, k, v, schedule, form, sinks_H=sinks_H)
    expected = one_softmax(q, k, v, sinks_H, schedule, form)
    upstream = torch.randn_like(expected)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(found, roots, upstream)
    for mine, its in zip(gradients, torch.autograd.grad(expected, roots, upstream), strict=True):
        assert torch.allclose(mine, its, rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_flex_attention_has_softcaps_and_sinks(softcap: float) -> None:
    """It computes what the dense calls do."""
    schedule, form = schedule_of(start=200), Form(scale=0.3, window=70, softcap=softcap)
    q, k, v = (x.detach().float() for x in inputs(schedule))
    sinks_H = torch.tensor([-2.0, 0.0, 1.5, 4.0])
    expected = tree_attention.tree_attention(q, k, v, schedule, form, sinks_H=sinks_H)
    found = flex_tree_attention(q, k, v, schedule, form, sinks_H=sinks_H)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("start", [0, 200])
def test_flex_attention_computes_the_same_tree(start: int, window: int | None) -> None:
    """Its block mask, made from bounds alone, masks exactly what the dense calls leave out."""
    schedule = schedule_of(start=start)
    q, k, v = (x.detach().float() for x in inputs(schedule))
    expected = tree_attention.tree_attention(q, k, v, schedule, Form(scale=0.3, window=window))
    found = flex_tree_attention(q, k, v, schedule, Form(scale=0.3, window=window))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    (mask,) = schedule.block_masks.values()
    assert mask.full_kv_num_blocks is not None and mask.sparsity() > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_in_the_type_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast norms leave queries and keys in fp32; the kernel gets bf16."""
    given: list[torch.dtype] = []

    def watch(*columns: Tensor, **options: Any) -> Any:
        given.extend(column.dtype for column in columns)
        kernel: Any = flex_kernel
        return kernel(*columns, **options)

    monkeypatch.setattr(flex, "_kernel", lambda _: watch)
    schedule = schedule_of()
    q, k, v = (x.detach().float() for x in inputs(schedule))
    out = flex_tree_attention(q, k, v.bfloat16(), schedule, Form(scale=0.3))
    assert {*given, out.dtype} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("size", "dtype", "small"),
    [
        (16, torch.float32, True),
        (192, torch.float32, True),
        (128, torch.bfloat16, False),
        (256, torch.bfloat16, False),
        (512, torch.bfloat16, True),
    ],
)
def test_block_sizes_fit_the_gpus_shared_memory(
    size: int, dtype: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own sizes exceed an H200's shared memory, or spill."""
    given: list[dict[str, Any]] = []

    def watch(*columns: Tensor, **options: Any) -> Any:
        given.append(options["kernel_options"])
        return columns[0]

    monkeypatch.setattr(flex, "_kernel", lambda _: watch)
    schedule = schedule_of()
    x = torch.zeros(1, 1, schedule.tokens, size, dtype=dtype)
    flex_tree_attention(x, x, x, schedule, Form(scale=0.3))
    (options,) = given
    assert options["BACKEND"] == "TRITON"
    assert ("fwd_BLOCK_M" in options) == small


@pytest.mark.matrix
def test_flex_attention_needs_few_compilations_for_all_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths, prefixes and windows are read at run time. Types, heads and the number of blocks
    give more variants than the eight that torch compiles by default."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_kernel, backend=counter, dynamic=True)
    monkeypatch.setattr(flex, "_kernel", lambda _: compiled)
    torch._dynamo.reset()
    kinds = [(heads, dtype) for heads in (2, 4) for dtype in (torch.float32, torch.bfloat16)]
    for heads, dtype in kinds:
        for start in (0, 200, 450):
            for window in (None, 70):
                schedule = schedule_of(start=start)
                q, k, v = (x.detach().to(dtype) for x in inputs(schedule))
                flex_tree_attention(q[:, :heads], k, v, schedule, Form(scale=0.3, window=window))
    assert 8 < counter.frame_count <= 4 * len(kinds)
