"""A batch whose data groups have each read and planned their own part of it.

Owns joining the parts to one step: the ranks exchange the work and passes of their trees and their
denominators, never trees of other groups. `forge.rl.learner.group_plans` divides a batch that
rank 0 has planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from forge.core.prefix_tree import Span
from forge.rl.collectives import lost_ranks
from forge.rl.learner.batch_plan import BatchPlan, Outline, Totals, joined
from forge.rl.learner.group_plans import spans_of, with_passes
from forge.rl.learner.share import group_trees
from forge.rl.losses.objective import BatchSize
from forge.rl.model.capabilities import pair_cost
from forge.rl.model.policy import TreePolicy
from forge.rl.parallel.rounds import TreeCost, divide_own
from forge.rl.tree.batch import TreeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """Facts of one data group's part in an update, for the other data groups."""

    costs: tuple[TreeCost, ...]
    """Costs of its trees, in order."""
    size: BatchSize
    trajectory_parts: int
    """Trajectories of each tree, summed; above `size.trajectories` if one is in several trees."""
    tree_tokens: int
    sample_tokens: int
    split_nodes: int
    unfit_routes: int


def joined_plan(
    own: Sequence[BatchPlan] | None, policy: TreePolicy, *, peers: dist.ProcessGroup | None
) -> BatchPlan:
    """The step of all data groups on a batch, with the trees of this rank's group.

    All ranks call it. `own` has the group's plan of each update; `peers` are all ranks of the
    group; only the first one has plans. Raises like `forge.rl.collectives.all_reduce`.
    """
    plans = _of_group(own, peers)
    arranged = [[policy.arranged(tree) for tree in plan.trees] for plan in plans]
    facts = [_facts(plan, trees, policy) for plan, trees in zip(plans, arranged, strict=True)]
    of_all = policy.world.exchanged(facts)
    updates = [
        _update(plan, trees, [one[number] for one in of_all], policy)
        for number, (plan, trees) in enumerate(zip(plans, arranged, strict=True))
    ]
    if len(updates) == 1:
        return updates[0]
    return replace(joined(updates, plan_s=0.0), route_shape=plans[0].route_shape)


def _of_group(
    own: Sequence[BatchPlan] | None, peers: dist.ProcessGroup | None
) -> Sequence[BatchPlan]:
    """The plans of the group's first rank, without samples, on all of its ranks."""
    plans = None if own is None else [replace(plan, samples=()) for plan in own]
    if peers is not None:
        packed: list[list[tuple[BatchPlan, list[tuple[Span, ...]]]] | None] = [None]
        if plans is not None:
            packed = [[_packed(plan) for plan in plans]]
        with lost_ranks():
            dist.broadcast_object_list(packed, group=peers, group_src=0)
        if plans is None and packed[0] is not None:
            plans = [_unpacked(*one) for one in packed[0]]
    assert plans is not None, "the first rank of a group has its plans"
    return plans


def _packed(plan: BatchPlan) -> tuple[BatchPlan, list[tuple[Span, ...]]]:
    """Passes repeat the layout: they are sent as ranges."""
    bare = tuple(replace(tree, parts=()) for tree in plan.trees)
    return replace(plan, trees=bare), [spans_of(tree) for tree in plan.trees]


def _unpacked(plan: BatchPlan, spans: Sequence[tuple[Span, ...]]) -> BatchPlan:
    return replace(plan, trees=tuple(map(with_passes, plan.trees, spans)))


def _facts(plan: BatchPlan, trees: Sequence[TreeBatch], policy: TreePolicy) -> UpdateFacts:
    weight = pair_cost(policy.channels)
    return UpdateFacts(
        costs=tuple(TreeCost(work=tree.work(weight), passes=policy.passes(tree)) for tree in trees),
        size=plan.size,
        trajectory_parts=sum(len(torch.unique(tree.trajectories_S)) for tree in trees),
        tree_tokens=plan.tree_tokens,
        sample_tokens=plan.sample_tokens,
        split_nodes=plan.split_nodes,
        unfit_routes=plan.unfit_routes,
    )


def _update(
    plan: BatchPlan, trees: Sequence[TreeBatch], of_all: Sequence[UpdateFacts], policy: TreePolicy
) -> BatchPlan:
    world = policy.world
    rounds = divide_own([one.costs for one in of_all])
    before = sum(one.size.trajectories for one in of_all[: world.data_group])
    numbered = [replace(one, trajectories_S=one.trajectories_S + before) for one in trees]
    own = group_trees(rounds, numbered, world.data_group, policy)
    size = BatchSize(
        tokens=sum(one.size.tokens for one in of_all),
        samples=sum(one.size.samples for one in of_all),
        trajectories=sum(one.size.trajectories for one in of_all),
    )
    return BatchPlan(
        trees=tuple(tree for tree, _ in own),
        plan_s=plan.plan_s,
        token_budget=plan.token_budget,
        route_shape=plan.route_shape,
        split_nodes=sum(one.split_nodes for one in of_all),
        unfit_routes=sum(one.unfit_routes for one in of_all),
        outline=Outline(
            size=size,
            divides_trajectories=sum(one.trajectory_parts for one in of_all) > size.trajectories,
            passes=tuple(passes for _, passes in own),
            totals=Totals(
                trained_tokens=size.tokens,
                tree_tokens=sum(one.tree_tokens for one in of_all),
                sample_tokens=sum(one.sample_tokens for one in of_all),
                empty_passes=rounds.empty_passes,
                imbalance=rounds.imbalance,
            ),
        ),
    )
