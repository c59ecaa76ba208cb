"""The states of recurrent layers that ranks of one tree hand to each other."""

from __future__ import annotations

from random import Random

import pytest
from torch.distributed import ProcessGroup

from forge.core.prefix_tree import plan_trees
from forge.rl.attention.forks import ROOT, plan_forks
from forge.rl.parallel.handed_states import handed_places, handed_states
from forge.rl.parallel.partition import rank_spans
from forge.rl.tree.batch import build_tree_batch
from forge.rl.tree.parts import cut_part
from tests.support.rl.models import make_sample
from tests.support.runtime.unused import unused


@pytest.mark.parametrize("ranks", [2, 5, 200])
def test_every_state_that_a_range_begins_with_is_handed_out_before(ranks: int) -> None:
    """By the rank that computes the token, in an earlier turn; and no other state is."""
    rng = Random(7)
    leaves = [[5, *rng.choices(range(3), k=rng.randrange(1, 12))] for _ in range(20)]
    samples = [make_sample(ids, (1, len(ids)), rng=rng) for ids in leaves]
    (plan,) = plan_trees(samples, token_budget=1 << 30)
    layout = build_tree_batch(plan, samples, channels=64).layout
    spans = rank_spans(layout, ranks, pair_cost=0.01)
    places = handed_places(layout, spans)
    assert all(
        start <= one < end for of, (start, end) in zip(places, spans, strict=True) for one in of
    )
    begun = set()
    for rank, span in enumerate(spans):
        if span[0] == span[1]:
            assert not places[rank]
            continue
        part = cut_part(layout, span)
        states = handed_states(layout, spans, part, rank=rank, group=unused(ProcessGroup))
        schedule = part.schedule
        forks = plan_forks(schedule.nodes, prefix=schedule.prefix, wanted=states.wanted)
        elsewhere = {
            states.prefix[parent]
            for batch in forks.batches
            for parent in batch.parents
            if ROOT < parent < schedule.prefix
        }
        turns = states.turns(after=False)
        assert elsewhere <= {one for turn in turns for one in places[turn]}
        assert {*turns, *states.turns(after=True)} == {r for r, one in enumerate(places) if one}
        begun |= elsewhere
    assert begun == {one for of in places for one in of}
