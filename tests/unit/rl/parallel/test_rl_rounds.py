"""Trees over data groups: every tree once, as many passes for each group, and balanced work."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from forge.core.prefix_tree import plan_trees
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.parallel.rounds import TreeCost, divide
from forge.rl.tree.batch import build_tree_batch
from tests.support.rl.forests import random_forest
from tests.support.rl.models import make_sample

COSTS = st.builds(TreeCost, work=st.floats(1, 1e6), passes=st.integers(1, 4))


@given(st.lists(COSTS, max_size=30), st.integers(1, 8))
def test_each_tree_is_in_one_round(costs: list[TreeCost], groups: int) -> None:
    """And a round has as many passes as its tree of most passes; the rest is counted as empty."""
    found = divide(costs, groups)
    placed = [index for one in found.rounds for index in one.trees if index is not None]
    assert sorted(placed) == list(range(len(costs)))
    assert all(len(one.trees) == groups for one in found.rounds)
    for one in found.rounds:
        assert one.passes == max(costs[index].passes for index in one.trees if index is not None)
    run = sum(groups * one.passes for one in found.rounds)
    assert found.empty_passes == run - sum(one.passes for one in costs)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=8), st.integers(1, 3))
def test_trees_of_similar_work_share_a_round(works: list[float], groups: int) -> None:
    """The time of a batch is at most that of any order of its trees."""
    costs = [TreeCost(work=work) for work in works]
    found = divide(costs, groups)
    shuffled = works[:]
    for seed in range(10):
        Random(seed).shuffle(shuffled)
        chunks = [shuffled[i : i + groups] for i in range(0, len(works), groups)]
        assert found.span <= sum(max(chunk) for chunk in chunks) + 1e-9
    assert found.imbalance >= -1e-9


def test_large_tree_is_divided_for_idle_groups() -> None:
    """One tree would leave three of four groups without work."""
    rng = Random(0)
    samples = [
        make_sample([n, *[rng.randrange(13) for _ in range(19)]], (1, 20), rng=rng)
        for n in range(12)
    ]
    together = plan_batch(samples, token_budget=10_000, channels=32)
    assert len(together.trees) == 1
    divided = plan_batch(samples, token_budget=10_000, channels=32, data_groups=4)
    assert len(divided.trees) >= 4
    assert divided.tree_tokens == together.tree_tokens


def test_plan_and_batch_have_the_same_work() -> None:
    """Work is counted the same before and after the tensors of a tree are built."""
    samples = random_forest(Random(3))
    for plan in plan_trees(samples, token_budget=20):
        tree = build_tree_batch(plan, samples, channels=8)
        assert abs(tree.work(0.01) - plan.work(0.01)) < 1e-6
