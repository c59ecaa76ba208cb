"""Prefix-tree planning: every plan is a lossless, minimal layout of the samples given."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample, Span, TreePlan, plan_trees

UNBOUNDED = 1 << 30


def sample(ids: Sequence[int], *trained: Span, temperature: float = 1.0) -> Sample:
    columns = bytes(4 * sum(end - start for start, end in trained))
    return Sample(
        ids=array("i", ids).tobytes(),
        trained=trained,
        behavior_logprobs=columns,
        weight_versions=columns,
        advantages=columns,
        temperature=temperature,
    )


def path_to(plan: TreePlan, index: int) -> list[int]:
    """The ids from the root to a layout index, found by parent links alone."""
    ids = array("i", plan.ids)
    path = []
    while index >= 0:
        node = next(node for node in plan.nodes if node.start <= index < node.end)
        path.append(ids[index])
        index = index - 1 if index > node.start else node.parent
    return path[::-1]


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@st.composite
def samples_lists(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for ids in draw(st.lists(sequences, min_size=1, max_size=12)):
        start = draw(st.integers(1, len(ids)))
        end = draw(st.integers(start, len(ids)))
        samples.append(sample(ids, (start, end)) if start < end else sample(ids))
    return samples


@given(samples_lists(), st.integers(1, 40))
def test_every_trained_token_keeps_its_whole_prefix(samples: list[Sample], budget: int) -> None:
    """The path to a trained token in the layout is the token's prefix."""
    plans = plan_trees(samples, token_budget=budget)
    assert sorted(index for plan in plans for index in plan.samples) == list(range(len(samples)))
    for plan in plans:
        for index, spans in zip(plan.samples, plan.trained, strict=True):
            ids = list(array("i", samples[index].ids))
            places = [place for start, end in spans for place in range(start, end)]
            depths = [d for start, end in samples[index].trained for d in range(start, end)]
            assert [path_to(plan, place) for place in places] == [ids[: d + 1] for d in depths]


@given(samples_lists())
def test_one_tree_holds_each_distinct_prefix_once(samples: list[Sample]) -> None:
    """Without a budget the layout has exactly as many tokens as there are distinct prefixes."""
    (plan,) = plan_trees(samples, token_budget=UNBOUNDED)
    prefixes = {one.ids[: 4 * length] for one in samples for length in range(1, one.tokens + 1)}
    assert plan.tokens == len(prefixes)


@given(samples_lists())
def test_nodes_tile_the_layout_and_descendants_are_contiguous(samples: list[Sample]) -> None:
    """Nodes cover the layout without gaps; the subtree of a node is one range."""
    (plan,) = plan_trees(samples, token_budget=UNBOUNDED)
    assert plan.nodes[0].start == 0 and plan.nodes[-1].end == plan.tokens
    for left, right in pairwise(plan.nodes):
        assert left.end == right.start
    for node in plan.nodes:
        inside = {child.start for child in plan.nodes if node.end <= child.start < node.subtree_end}
        below = {
            child.start
            for child in plan.nodes
            if child.start != node.start and node.start in ancestors(plan, child.start)
        }
        assert inside == below
        assert node.depth == len(path_to(plan, node.start)) - 1


def ancestors(plan: TreePlan, start: int) -> set[int]:
    by_start = {node.start: node for node in plan.nodes}
    holder = {place: node.start for node in plan.nodes for place in range(node.start, node.end)}
    found = set()
    parent = by_start[start].parent
    while parent >= 0:
        found.add(holder[parent])
        parent = by_start[holder[parent]].parent
    return found


@given(samples_lists())
def test_no_node_has_a_single_child(samples: list[Sample]) -> None:
    """Chains are collapsed: a node either branches or is a leaf."""
    (plan,) = plan_trees(samples, token_budget=UNBOUNDED)
    for node in plan.nodes:
        children = [child for child in plan.nodes if child.parent == node.end - 1]
        assert len(children) != 1


@given(samples_lists(), st.integers(1, 40), st.sampled_from([0.0, 0.25]))
def test_planned_trees_have_the_least_cost(
    samples: list[Sample], budget: int, pair_cost: float
) -> None:
    """Each run of samples is one tree, relayed or not; recompute and relay are weighed against each
    other."""
    plans = plan_trees(samples, token_budget=budget, pair_cost=pair_cost)
    ordered = sorted(samples, key=lambda one: one.ids)

    def cost(run: list[Sample]) -> float:
        prefixes = {one.ids[: 4 * n] for one in run for n in range(1, one.tokens + 1)}
        work = sum(1 + pair_cost * len(prefix) / 4 for prefix in prefixes)
        return 3 * work + (max(0.0, work - budget) if len(prefixes) > budget else 0.0)

    best = [0.0]
    for end in range(1, len(ordered) + 1):
        best.append(min(best[start] + cost(ordered[start:end]) for start in range(end)))
    chosen = sum(cost([samples[index] for index in plan.samples]) for plan in plans)
    assert chosen == pytest.approx(best[-1])


def test_shared_prefix_is_recomputed_where_it_is_cheaper() -> None:
    """Two answers to a short prompt make two trees; to a long one, a single relayed tree."""

    def plans(prompt: int) -> list[int]:
        pair = [sample([1] * prompt + [end] * 20, (prompt, prompt + 20)) for end in (2, 3)]
        return [len(plan.parts) for plan in plan_trees(pair, token_budget=prompt + 20)]

    assert plans(4) == [1, 1]
    assert plans(40) == [2]


@given(samples_lists(), st.integers(1, 40))
def test_parts_tile_a_tree_within_the_budget(samples: list[Sample], budget: int) -> None:
    """No part is larger than the budget, and the last part of a relayed tree is full."""
    for plan in plan_trees(samples, token_budget=budget):
        assert plan.parts[0][0] == 0 and plan.parts[-1][1] == plan.tokens
        assert all(left[1] == right[0] for left, right in pairwise(plan.parts))
        sizes = [end - start for start, end in plan.parts]
        assert all(0 < size <= budget for size in sizes)
        assert sizes[1:] == [budget] * (len(sizes) - 1)


@given(samples_lists(), st.integers(1, 40))
def test_tree_without_relay_is_one_part(samples: list[Sample], budget: int) -> None:
    """Every sample is in one tree; only a sample longer than the budget exceeds it."""
    plans = plan_trees(samples, token_budget=budget, relay=False)
    assert sorted(index for plan in plans for index in plan.samples) == [*range(len(samples))]
    for plan in plans:
        assert plan.parts == ((0, plan.tokens),)
        assert plan.tokens <= budget or len(plan.samples) == 1


@given(samples_lists())
def test_every_sample_ends_at_its_last_token(samples: list[Sample]) -> None:
    """The path to a sample's last place is the whole sample."""
    (plan,) = plan_trees(samples, token_budget=UNBOUNDED)
    for index, last in zip(plan.samples, plan.lasts, strict=True):
        assert path_to(plan, last) == list(array("i", samples[index].ids))


def test_ids_that_share_bytes_but_not_tokens_do_not_merge() -> None:
    """Ids 1 and 257 share three of their four bytes and are still different tokens."""
    (plan,) = plan_trees(
        [sample([5, 1, 7], (1, 3)), sample([5, 257, 7], (1, 3))], token_budget=UNBOUNDED
    )
    assert plan.tokens == 5


def test_no_samples_need_no_trees() -> None:
    """An empty batch is planned as no work."""
    assert plan_trees([], token_budget=8) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (sample([], (1, 1)), "0 bytes"),
        (sample([1, 2], (0, 1)), "trained range"),
        (sample([1, 2], (1, 3)), "trained range"),
        (sample([1, 2, 3, 4], (2, 3), (1, 2)), "trained range"),
        (sample([1, 2], (1, 2), temperature=0.0), "temperature"),
    ],
)
def test_inconsistent_sample_is_refused(bad: Sample, words: str) -> None:
    """The error names the fault before any tree is planned."""
    with pytest.raises(InvalidArgument, match=words):
        bad.validate()


def test_columns_of_the_wrong_length_are_refused() -> None:
    """One entry per trained token."""
    good = sample([1, 2, 3], (1, 3))
    bad = Sample(
        ids=good.ids,
        trained=good.trained,
        behavior_logprobs=good.behavior_logprobs,
        weight_versions=good.weight_versions[:4],
        advantages=good.advantages,
    )
    with pytest.raises(InvalidArgument, match="weight_versions"):
        bad.validate()
