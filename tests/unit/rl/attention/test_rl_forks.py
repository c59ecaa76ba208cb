"""The batches of nodes that recurrent layers compute together."""

from __future__ import annotations

from random import Random

import pytest
import torch

from forge.core.prefix_tree import plan_trees
from forge.rl.attention.forks import ROOT, After, Forks, plan_forks
from forge.rl.attention.schedule import AttentionSchedule
from forge.rl.tree.batch import build_tree_batch
from forge.rl.tree.parts import cut_part
from tests.support.rl.models import make_sample


def schedule_of(*, start: int = 0) -> AttentionSchedule:
    """Samples over three tokens: nodes of one token and of several, at many depths."""
    rng = Random(3)
    leaves = [[5, *rng.choices(range(3), k=rng.randrange(1, 14))] for _ in range(60)]
    samples = [make_sample(ids, (1, len(ids)), rng=rng) for ids in leaves]
    (plan,) = plan_trees(samples, token_budget=1 << 30)
    batch = build_tree_batch(plan, samples, channels=64)
    return cut_part(batch.layout, (start, batch.tokens)).schedule


def forks_of(schedule: AttentionSchedule) -> Forks:
    return plan_forks(schedule.nodes, prefix=schedule.prefix)


@pytest.mark.parametrize("start", [0, 90])
def test_each_token_is_computed_and_found(start: int) -> None:
    """Of all computed tokens, padding included, the outputs are those of the part in its order."""
    schedule = schedule_of(start=start)
    forks = forks_of(schedule)
    computed = torch.cat([batch.places_BT.flatten() for batch in forks.batches])
    own = schedule.tokens - schedule.prefix
    assert torch.equal(computed[forks.outputs_L], torch.arange(own))
    assert len(computed) <= 2 * own


@pytest.mark.parametrize("start", [0, 90])
def test_each_node_follows_its_parent(start: int) -> None:
    """The state that a node begins with is that of the prefix, or of an earlier batch."""
    schedule = schedule_of(start=start)
    known = {ROOT, *range(schedule.prefix)}
    for batch in forks_of(schedule).batches:
        assert known.issuperset(batch.parents)
        assert (ROOT in batch.parents) == ({*batch.parents} == {ROOT})
        if batch.after is not After.NOTHING:
            known.update(batch.lasts)


def test_no_node_with_a_parent_is_a_single_token() -> None:
    """Layers would take their path for decoding, which has no gradient."""
    batches = forks_of(schedule_of()).batches
    assert {batch.after for batch in batches} == {*After}
    for batch in batches:
        pending = batch.after is After.PENDING
        assert batch.places_BT.shape[1] >= 2 or batch.parents[0] == ROOT
        assert not pending or batch.places_BT.shape[1] == 2


def test_state_that_another_part_wants_is_computed() -> None:
    """Although no node of this part follows."""
    schedule = schedule_of()
    leaf = next(one for one in schedule.nodes if one.end == one.subtree_end and one.depth > 1)
    forks = plan_forks(schedule.nodes, prefix=0, wanted={leaf.end - 1})
    (batch,) = (one for one in forks.batches if leaf.end - 1 in one.lasts)
    assert batch.after is not After.NOTHING
