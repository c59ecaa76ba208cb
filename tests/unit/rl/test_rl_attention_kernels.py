"""Every kernel that trees are computed with computes the same."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from forge.core.packing import plan_trees
from forge.rl import attention_kernels, tree_attention
from forge.rl.attention_kernels import Portable
from forge.rl.attention_schedule import AttentionSchedule
from forge.rl.flex_attention import flex_tree_attention
from forge.rl.tree_batch import build_tree_batch
from forge.rl.tree_parts import cut_part
from tests.support.rl_models import make_sample

WINDOWS = [None, 70]


def schedule_of(*, start: int = 0) -> AttentionSchedule:
    """Some 600 tokens: a trunk, branches at several depths, a bush of short answers."""
    rng = Random(5)

    def ids(count: int) -> list[int]:
        return [rng.randrange(50) for _ in range(count)]

    trunk, branch = ids(140), ids(90)
    leaves = [trunk + branch + ids(110), trunk + branch + ids(37), trunk[:60] + ids(130)]
    leaves += [[*trunk, token, token] for token in range(12)]
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
def test_the_portable_kernel_equals_the_cpus_own(
    start: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward in fp64, with grouped heads, masks, and chunks of queries."""
    schedule = schedule_of(start=start)
    found = []
    for portable in (False, True):
        if portable:
            monkeypatch.setattr(attention_kernels, "CHUNK_SCORES", 5000)
            monkeypatch.setattr(tree_attention, "kernel_for", lambda _: Portable())
        q, k, v = inputs(schedule)
        out = tree_attention.tree_attention(q, k, v, schedule, scale=0.3, window=window)
        out.sin().sum().backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for own, other in zip(*found, strict=True):
        assert own is not None and other is not None
        assert torch.allclose(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("start", [0, 200])
def test_flex_attention_sees_the_same_tree(start: int, window: int | None) -> None:
    """Its block mask, made from bounds alone, hides what the dense calls leave out."""
    schedule = schedule_of(start=start)
    q, k, v = (x.detach().float() for x in inputs(schedule))
    expected = tree_attention.tree_attention(q, k, v, schedule, scale=0.3, window=window)
    found = flex_tree_attention(q, k, v, schedule, scale=0.3, window=window)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    (mask,) = schedule.block_masks.values()
    assert mask.full_kv_num_blocks is not None and mask.sparsity() > 0
