"""How the work of a tree is shared among ranks."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge.core.prefix_tree import Sample
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.parallel.partition import held_tokens, largest_range, rank_spans
from forge.rl.tree.parts import TreeLayout
from tests.support.rl.forests import KINDS, forest, random_forest
from tests.support.rl.models import make_sample

FORESTS = [*map(forest, KINDS), *(random_forest(Random(seed)) for seed in range(30))]


def layout_of(samples: list[Sample]) -> TreeLayout:
    (tree,) = plan_batch(samples, token_budget=1 << 30, channels=32).trees
    return tree.layout


@pytest.mark.parametrize("pair_cost", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_no_rank_has_more_than_its_share_and_a_token(ranks: int, pair_cost: float) -> None:
    """A cut is at the last token that begins below a multiple of the share, so a range exceeds it
    by less than its heaviest token; the ranges follow each other and cover the layout."""
    for samples in FORESTS:
        layout = layout_of(samples)
        spans = rank_spans(layout, ranks, pair_cost=pair_cost)
        assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == len(layout.ids_L)
        work_L = 1 + pair_cost * (1 + layout.positions_L.double())
        most = max(float(work_L[start:end].sum()) for start, end in spans)
        assert most <= float(work_L.sum()) / ranks + float(work_L.max()) + 1e-9


def test_ranks_of_a_long_chain_have_equal_work_not_equal_tokens() -> None:
    """Deep tokens attend more, so the first of four ranks has most of the tokens."""
    layout = layout_of([make_sample([1] * 4000, (3999, 4000), rng=Random(0))])
    pair_cost = 0.002
    spans = rank_spans(layout, 4, pair_cost=pair_cost)
    work_L = 1 + pair_cost * torch.arange(1, 4001).double()
    shares = [float(work_L[start:end].sum() / work_L.sum()) for start, end in spans]
    assert shares == pytest.approx([0.25] * 4, abs=1e-3)
    tokens = [end - start for start, end in spans]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] > 1.5 * 1000
    for prefix_cost in (0.0, 1.0):
        held = [held_tokens(layout, span, prefix_cost=prefix_cost) for span in spans]
        assert largest_range(4000, 4, pair_cost=pair_cost, prefix_cost=prefix_cost) == (
            tokens[0],
            max(held),
        )


def test_ranks_of_a_long_chain_hold_no_more_than_the_budget() -> None:
    """With equal work the first of four would hold 1,550 tokens of 4,000; the excess goes to the
    next ranks, with the least possible work."""
    layout = layout_of([make_sample([1] * 4000, (3999, 4000), rng=Random(0))])
    cut: dict[str, Any] = {"pair_cost": 0.002, "prefix_cost": 0.02}
    apart = rank_spans(layout, 4, **cut)
    spans = rank_spans(layout, 4, budget=1100, **cut)
    held = [held_tokens(layout, span, prefix_cost=0.02) for span in spans]
    assert max(held_tokens(layout, span, prefix_cost=0.02) for span in apart) > 1500
    assert max(held) <= 1100
    assert [end - start for start, end in spans[:2]] == [1100, 1078]
    work_L = 1 + 0.002 * torch.arange(1, 4001).double()
    shares = [float(work_L[start:end].sum() / work_L.sum()) for start, end in spans]
    assert shares[2] == pytest.approx(shares[3], abs=1e-3)


def test_cut_without_a_fit_minimizes_the_largest_rank() -> None:
    """A sample four times as long as the budget, on two ranks."""
    layout = layout_of([make_sample([1] * 400, (399, 400), rng=Random(0))])
    spans = rank_spans(layout, 2, pair_cost=0.01, budget=100)
    assert spans == [(0, 200), (200, 400)]


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 10_000),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 12),
    pair_cost=st.sampled_from([0.0, 0.05, 1.0]),
    prefix_cost=st.sampled_from([0.0, 0.1, 0.7]),
)
# Nothing fits, and 2.3 tokens less 0.3 of a prefix are a bit less than two.
@example(seed=980, ranks=4, budget=1, pair_cost=0.05, prefix_cost=0.1)
def test_cut_is_the_best_of_all_cuts_that_fit(
    seed: int, ranks: int, budget: int, pair_cost: float, prefix_cost: float
) -> None:
    """Compared with every cut of a small tree: each token is on one rank, no rank holds more than
    the budget if that is possible, and no such cut has a lighter heaviest rank. Where equal work
    fits, it is the cut without a budget."""
    rng = Random(seed)
    chains = [[rng.randrange(2) for _ in range(rng.randrange(1, 6))] for _ in range(3)]
    samples = [make_sample([9, *one], (1, len(one) + 1), rng=rng) for one in chains]
    layout = layout_of(samples)
    tokens = len(layout.ids_L)
    work_L = 1 + pair_cost * (1 + layout.positions_L.double())

    def most_held(spans: list[tuple[int, int]]) -> float:
        return max(held_tokens(layout, span, prefix_cost=prefix_cost) for span in spans)

    def most_work(spans: list[tuple[int, int]]) -> float:
        return max(float(work_L[start:end].sum()) for start, end in spans)

    spans = rank_spans(layout, ranks, pair_cost=pair_cost, budget=budget, prefix_cost=prefix_cost)
    equal = rank_spans(layout, ranks, pair_cost=pair_cost)
    assert [place for span in spans for place in range(*span)] == list(range(tokens))
    assert len(spans) == ranks
    every = [
        list(pairwise((0, *cuts, tokens)))
        for cuts in combinations_with_replacement(range(tokens + 1), ranks - 1)
    ]
    fitting = [one for one in every if most_held(one) <= budget]
    if most_held(equal) <= budget:
        assert spans == equal
    elif fitting:
        assert most_held(spans) <= budget
        assert most_work(spans) <= min(map(most_work, fitting)) + 0.5
    else:
        assert most_held(spans) <= min(map(most_held, every)) + 0.5
