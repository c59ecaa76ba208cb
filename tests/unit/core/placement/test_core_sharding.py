"""Rendezvous hashing of groups to pool shards."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import Unavailable
from forge.core.placement.sharding import choose_shard

names = st.text(min_size=1, max_size=80)
shard_sets = st.sets(names, min_size=1, max_size=8)


@given(group=names, shards=shard_sets, data=st.data())
def test_choice_depends_on_the_set_of_shards_alone(group, shards, data):
    """Any order of the same live shards gives the same choice, and it is one of them."""
    shuffled = data.draw(st.permutations(sorted(shards)))
    assert choose_shard(group, shuffled) == choose_shard(group, shards)
    assert choose_shard(group, shards) in shards


@given(group=names, shards=shard_sets, joining=names)
def test_joining_shard_moves_groups_only_to_itself(group, shards, joining):
    """When a shard joins, each group goes to the new one or stays."""
    before = choose_shard(group, shards)
    assert choose_shard(group, shards | {joining}) in {before, joining}


@given(group=names, shards=shard_sets, data=st.data())
def test_leaving_shard_moves_only_its_own_groups(group, shards, data):
    """The groups of every other shard stay."""
    leaving = data.draw(st.sampled_from(sorted(shards)))
    before = choose_shard(group, shards)
    if before != leaving:
        assert choose_shard(group, shards - {leaving}) == before


@pytest.mark.parametrize("count", [2, 3, 8])
def test_groups_spread_evenly(count):
    """Over 20,000 groups no shard is more than a tenth away from its fair part."""
    shards = [f"shard-{i}" for i in range(count)]
    load = Counter(choose_shard(f"task-{i}", shards) for i in range(20_000))
    fair = 20_000 / count
    assert all(abs(load[shard] - fair) < 0.1 * fair for shard in shards)


def test_choice_is_the_same_in_every_process():
    """The choice is pinned: processes of different versions must agree where a group goes."""
    shards = ["a", "b", "c"]
    assert [choose_shard(f"g{i}", shards) for i in range(8)] == list("aaabaabb")


def test_no_live_shard_is_unavailable():
    """Without a live shard the group is named in an error that says to retry."""
    with pytest.raises(Unavailable, match="group g7"):
        choose_shard("g7", [])
