"""Parts of a planned batch: each data group receives its own trees, whole and once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from random import Random
from typing import Any

import pytest
import torch

from forge.core.prefix_tree import Sample
from forge.rl.config import MeshShape
from forge.rl.learner.batch_plan import BatchPlan, plan_batch
from forge.rl.learner.group_plans import group_plans
from forge.rl.model.policy import TreePolicy
from forge.rl.parallel.world import World
from forge.rl.tree.batch import TreeBatch
from tests.support.rl.models import make_sample, tiny_model

GROUPS = 3


def samples(count: int = 9) -> list[Sample]:
    """Long answers to prompts of four tokens, two samples of a trajectory each."""
    rng = Random(1)
    made = []
    for number in range(count):
        ids = [number // 3, 3, 5, number % 3, *(rng.randrange(13) for _ in range(20 + 4 * number))]
        one = make_sample(ids, (4, len(ids)), rng=rng)
        made.append(replace(one, group=number // 3, trajectory=number // 2))
    return made


def policy(family: str = "qwen3") -> TreePolicy:
    made = TreePolicy(tiny_model(family, torch.float32))
    made.world = World(shape=MeshShape(dp_shard=GROUPS))
    return made


def planned(policy: TreePolicy, given: Sequence[Sample], **options: Any) -> BatchPlan:
    return plan_batch(given, channels=policy.channels, data_groups=GROUPS, **options)


def equal(one: Any, other: Any) -> bool:
    """Of dataclasses of tensors."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if is_dataclass(one):
        return all(equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return bool(one == other)


@pytest.mark.parametrize("options", [{}, {"mini_batches": 2}, {"token_budget": 24}])
@pytest.mark.parametrize("family", ["qwen3", "llama4"])
def test_groups_receive_all_trees_of_each_update_once(family: str, options: Any) -> None:
    """Relayed ones too, and those of models that are trained sequence by sequence; with as many
    passes in each group, and what the loss needs of the whole update."""
    one = policy(family)
    plan = planned(one, samples(), **{"token_budget": 200, **options})
    parts = [pickle.loads(pickle.dumps(part)).plan() for part in group_plans(plan, one)]
    assert len(parts) == GROUPS
    for number, update in enumerate(plan.updates):
        shares = [part.updates[number] for part in parts]
        got = [tree for share in shares for tree in share.trees if tree.trained_tokens]
        expected = [one.arranged(tree) for tree in update.trees]
        assert sorted(map(key, got)) == sorted(map(key, expected))
        found = {tuple(key(tree)): tree for tree in got}
        assert all(equal(found[tuple(key(tree))], tree) for tree in expected)
        outlines = [share.outline for share in shares if share.outline is not None]
        assert len({outline.passes for outline in outlines}) == 1
        assert {share.size for share in shares} == {update.size}
        assert {share.divides_trajectories for share in shares} == {update.divides_trajectories}


def key(tree: TreeBatch) -> list[int]:
    ids: list[int] = tree.layout.ids_L.tolist()
    return ids


def test_group_receives_tokens_in_proportion_to_its_work() -> None:
    """Passes are cut where they are computed; samples are not sent."""
    one = policy()
    given = samples(48)
    plan = planned(one, given, token_budget=400)
    parts = group_plans(plan, one)
    assert sum(part.tree_tokens for part in parts) == plan.tree_tokens
    sizes = [len(pickle.dumps(part)) for part in parts]
    assert max(sizes) < len(pickle.dumps(replace(plan, samples=()))) / 2
    assert max(part.tree_tokens for part in parts) < plan.tree_tokens / 2


def test_batch_without_trees_is_no_tree_for_each_group() -> None:
    """Each rank then skips the batch."""
    one = policy()
    for part in group_plans(planned(one, [], token_budget=200), one):
        assert part.plan().trees == () and part.tree_tokens == 0
