"""How the work of a tree is shared among ranks."""

from __future__ import annotations

from random import Random

import pytest
import torch

from forge.core.packing import Sample
from forge.rl.batch_plan import plan_batch
from forge.rl.tree_parts import TreeLayout, balanced_spans
from tests.support.rl_forests import KINDS, forest, random_forest
from tests.support.rl_models import make_sample

FORESTS = [*map(forest, KINDS), *(random_forest(Random(seed)) for seed in range(30))]


def layout_of(samples: list[Sample]) -> TreeLayout:
    (tree,) = plan_batch(samples, token_budget=1 << 30, channels=32).trees
    return tree.layout


@pytest.mark.parametrize("pair_cost", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_no_rank_has_more_than_its_share_and_a_token(ranks: int, pair_cost: float) -> None:
    """A cut is at the last token that begins below a multiple of the share, so a range exceeds it
    by less than its heaviest token; the ranges follow each other and are the whole layout."""
    for samples in FORESTS:
        layout = layout_of(samples)
        spans = balanced_spans(layout, ranks, pair_cost=pair_cost)
        assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == len(layout.ids_L)
        work_L = 1 + pair_cost * (1 + layout.positions_L.double())
        most = max(float(work_L[start:end].sum()) for start, end in spans)
        assert most <= float(work_L.sum()) / ranks + float(work_L.max()) + 1e-9


def test_a_long_chains_ranks_are_equal_in_work_and_not_in_tokens() -> None:
    """What is deep attends more, so the first of four ranks has most of the tokens."""
    layout = layout_of([make_sample([1] * 4000, (3999, 4000), rng=Random(0))])
    pair_cost = 0.002
    spans = balanced_spans(layout, 4, pair_cost=pair_cost)
    work_L = 1 + pair_cost * torch.arange(1, 4001).double()
    shares = [float(work_L[start:end].sum() / work_L.sum()) for start, end in spans]
    assert shares == pytest.approx([0.25] * 4, abs=1e-3)
    tokens = [end - start for start, end in spans]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] > 1.5 * 1000
