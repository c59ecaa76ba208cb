"""A schedule computes every ancestor of every token once, and nothing else."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.prefix_tree import Node, Sample, TreePlan, plan_trees
from forge.rl.attention import schedule as schedule_module
from forge.rl.attention.schedule import AttentionSchedule, schedule_attention
from forge.rl.tree.batch import build_tree_batch
from forge.rl.tree.parts import cut_part
from tests.support.rl.models import make_sample


def ancestry(plan: TreePlan) -> torch.Tensor:
    """[L, L]: is the key the query itself or an ancestor, by parent links alone."""
    parents = list(range(-1, plan.tokens - 1))
    for node in plan.nodes:
        parents[node.start] = node.parent
    seen = torch.zeros(plan.tokens, plan.tokens, dtype=torch.int)
    for query in range(plan.tokens):
        key = query
        while key >= 0:
            seen[query, key] += 1
            key = parents[key]
    return seen


def coverage(schedule: AttentionSchedule, window: int | None = None) -> torch.Tensor:
    """[queries, keys]: how often the calls compute each pair."""
    own = schedule.tokens - schedule.prefix
    seen = torch.zeros(own, schedule.tokens, dtype=torch.int)
    for call in schedule.calls(window):
        keys = torch.arange(schedule.tokens)[call.keys]
        part = torch.ones(call.queries.stop - call.queries.start, len(keys), dtype=torch.bool)
        if call.sight is not None:
            part = call.sight.visible()
        if call.causal:
            part = part.tril()
        seen[call.queries.start : call.queries.stop, keys] += part
    return seen


def samples_of(sequences: list[list[int]]) -> list[Sample]:
    rng = Random(0)
    return [make_sample(ids, (1, len(ids)), rng=rng) for ids in sequences]


def plan_of(sequences: list[list[int]]) -> TreePlan:
    (plan,) = plan_trees(samples_of(sequences), token_budget=1 << 30)
    return plan


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12),
    st.sampled_from([1, 30, 1000, 1 << 30]),
    st.sampled_from([2, 192]),
    st.integers(1, 9),
)
def test_schedule_computes_every_pair_exactly_once(
    sequences: list[list[int]], channels: int, chain_tokens: int, window: int
) -> None:
    """At any cost of a call, the calls cover exactly the ancestry, and with a sliding window its
    reachable part."""
    plan = plan_of(sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_module, "CALL_FLOPS", 6e4)
        patch.setattr(schedule_module, "CHAIN_TOKENS", chain_tokens)
        schedule = schedule_attention(plan.nodes, channels=channels)
    assert torch.equal(coverage(schedule), ancestry(plan))
    near = (schedule.positions_K[:, None] - schedule.positions_K) < window
    assert torch.equal(coverage(schedule, window), ancestry(plan) * near)
    assert [block.start for block in schedule.blocks] == [
        0,
        *(block.end for block in schedule.blocks[:-1]),
    ]
    assert schedule.depth == max(map(len, sequences))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from([1, 30, 1 << 30]),
    st.integers(1, 9),
)
def test_parts_attend_the_same_pairs_as_the_whole_tree(
    sequences: list[list[int]], budget: int, channels: int, window: int
) -> None:
    """Each part's calls are the rows of the whole ancestry, over its prefix and itself."""
    plan = plan_of(sequences)
    whole = ancestry(plan)
    batch = build_tree_batch(plan, samples_of(sequences), channels=channels)
    for start in range(0, plan.tokens, budget):
        part = cut_part(batch.layout, (start, min(start + budget, plan.tokens)))
        rows = torch.arange(start, start + part.tokens)
        keys = torch.cat([part.prefix_P, rows])
        assert torch.equal(coverage(part.schedule), whole[rows][:, keys])
        assert whole[rows].sum() == coverage(part.schedule).sum()
        places = batch.layout.positions_L
        near = places[rows][:, None] - places[keys] < window
        assert torch.equal(coverage(part.schedule, window), whole[rows][:, keys] * near)


def test_many_short_answers_are_one_call() -> None:
    """Eight answers of two tokens to one prompt do not take seventeen calls."""
    plan = plan_of([[9] * 4 + [token, token] for token in range(8)])
    schedule = schedule_attention(plan.nodes, channels=256)
    assert len(schedule.blocks) == 1 and not schedule.slabs


def test_long_prompt_is_attended_without_masks() -> None:
    """Where masks would cost more than calls."""
    root, first = Node(0, 1000, 3000, 0, -1), Node(1000, 2000, 2000, 1000, 999)
    nodes = (root, first, Node(2000, 3000, 3000, 1000, 999))
    schedule = schedule_attention(nodes, channels=1024)
    assert all(block.causal for block in schedule.blocks)
    assert (0, 1000, 3000) in schedule.slabs
