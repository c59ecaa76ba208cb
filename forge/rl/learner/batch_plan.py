"""A batch of samples, merged into prefix trees and ready for the learner.

Owns the plan of a whole batch and its counts. One tree is `forge.rl.tree.batch`;
`forge.core.prefix_tree` divides samples into trees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from forge.core.prefix_tree import Sample, TreePlan, plan_trees
from forge.core.routes import RouteShape
from forge.rl.learner.mini_batches import mini_batches as divide_samples
from forge.rl.losses.objective import BatchSize
from forge.rl.model.capabilities import pair_cost
from forge.rl.parallel.rounds import TreeCost, divide
from forge.rl.tree.batch import TreeBatch, build_tree_batch, trajectories_of
from forge.rl.tree.routes import route_keys, split_nodes

TRIED_ROUNDS = 4
"""Numbers of trees per data group that a plan is tried with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts of an update over all data groups."""

    trained_tokens: int
    tree_tokens: int
    sample_tokens: int
    empty_passes: int
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Facts of an update that a data group has besides its own trees."""

    size: BatchSize
    """Size of the whole update."""
    divides_trajectories: bool
    """Whether the plan of the whole update divides trajectories."""
    passes: tuple[int, ...]
    """Passes of each of its trees, with empty ones."""
    totals: Totals | None = None
    """None where rank 0 alone needs them, and has the whole plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A planned batch, made before its step, on any thread."""

    trees: tuple[TreeBatch, ...]
    plan_s: float
    samples: tuple[Sample, ...] = ()
    """The merged samples, for another plan with another budget."""
    token_budget: int = 0
    route_shape: RouteShape | None = None
    """Shape of the routes of a model that replays recorded experts; None: they are ignored."""
    split_nodes: int = 0
    """Nodes that hold a token again, since the recorded experts of its samples differ."""
    unfit_routes: int = 0
    """Columns of recorded experts that are of another model: their tokens have none."""
    mini_batches: tuple[BatchPlan, ...] = ()
    """A plan for each update of a pass over the batch; empty: one update on the whole batch. Their
    trees are those of this plan."""
    outline: Outline | None = None
    """Outline of the plan of one update, if its trees are those of one data group; such a plan has
    no samples (`forge.rl.learner.group_plans`)."""

    @property
    def updates(self) -> tuple[BatchPlan, ...]:
        """The plan of each update of a pass over the batch."""
        return self.mini_batches or (self,)

    @property
    def largest_tree(self) -> int:
        """Tokens of the largest pass, which determine the memory."""
        return max((tree.pass_tokens for tree in self.trees), default=0)

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of all samples."""
        return self._total("trained_tokens", [tree.trained_tokens for tree in self.trees])

    @property
    def size(self) -> BatchSize:
        """Denominators of the loss of one update on the whole plan."""
        if self.outline is not None:
            return self.outline.size
        return BatchSize(
            tokens=self.trained_tokens,
            samples=sum(len(tree.lengths_S) for tree in self.trees),
            trajectories=1 + max(int(tree.trajectories_S.max()) for tree in self.trees)
            if self.trees
            else 0,
        )

    @property
    def divides_trajectories(self) -> bool:
        """Whether samples of one trajectory are in several trees."""
        if self.outline is not None:
            return self.outline.divides_trajectories
        apart = sum(len(torch.unique(tree.trajectories_S)) for tree in self.trees)
        return apart > self.size.trajectories

    @property
    def tree_tokens(self) -> int:
        """Tokens that are computed."""
        return self._total("tree_tokens", [tree.tokens for tree in self.trees])

    @property
    def sample_tokens(self) -> int:
        """Tokens that would be computed without merging."""
        return self._total("sample_tokens", [tree.sample_tokens for tree in self.trees])

    def _total(self, name: str, of_trees: Sequence[int]) -> int:
        """Over all data groups, if the trees are those of one."""
        totals = [one.outline.totals for one in self.updates if one.outline is not None]
        known = [int(getattr(one, name)) for one in totals if one is not None]
        return sum(known) if known else sum(of_trees)


def plan_batch(
    samples: Sequence[Sample],
    *,
    token_budget: int,
    channels: int,
    relay: bool = True,
    data_groups: int = 1,
    mini_batches: int = 1,
    route_shape: RouteShape | None = None,
) -> BatchPlan:
    """Merge a batch's samples into trees, on any thread; needs no weights.

    `channels` is `attention_channels` of the model; ranks that share trees do not `relay`. With
    several data groups the trees are those that the groups finish earliest. Trees never contain
    samples of two of the `mini_batches`. `route_shape` is that of a model that replays recorded
    experts, None: they are ignored. Raises `InvalidArgument` for a malformed sample.
    """
    began = time.perf_counter()
    trainable = _trainable(samples, route_shape)
    plan = partial(
        _plan_update,
        token_budget=token_budget,
        channels=channels,
        relay=relay,
        data_groups=data_groups,
        route_shape=route_shape,
    )
    parts = divide_samples(trainable, mini_batches) if mini_batches > 1 else []
    planned: tuple[BatchPlan, ...] = ()
    if len(parts) > 1:
        planned = tuple(plan(part) for part in parts)
    whole = joined(planned, plan_s=0.0) if planned else plan(trainable)
    return replace(
        whole,
        samples=tuple(trainable),
        plan_s=time.perf_counter() - began,
        route_shape=route_shape,
    )


def plan_updates(
    updates: Sequence[Sequence[Sample]],
    *,
    token_budget: int,
    channels: int,
    relay: bool = True,
    route_shape: RouteShape | None = None,
) -> list[BatchPlan]:
    """The plan of each update of one data group, whose samples are given; like `plan_batch`."""
    return [
        _plan_update(
            _trainable(samples, route_shape),
            token_budget=token_budget,
            channels=channels,
            relay=relay,
            data_groups=1,
            route_shape=route_shape,
        )
        for samples in updates
    ]


def _trainable(samples: Sequence[Sample], route_shape: RouteShape | None) -> list[Sample]:
    for sample in samples:
        sample.validate()
    trainable = [sample for sample in samples if sample.trained]
    if route_shape is None:  # other ranks need not get them
        return [replace(one, routes=()) if one.routes else one for one in trainable]
    return trainable


def whole_plan(given: BatchPlan, computed: Sequence[BatchPlan]) -> BatchPlan:
    """The plan of a batch from those of its computed updates."""
    if not given.mini_batches:
        return computed[0]
    return replace(joined(computed, plan_s=given.plan_s), samples=given.samples)


def joined(plans: Sequence[BatchPlan], *, plan_s: float) -> BatchPlan:
    """One plan with the trees of several updates of a pass."""
    return BatchPlan(
        trees=tuple(tree for plan in plans for tree in plan.trees),
        plan_s=plan_s,
        token_budget=min(plan.token_budget for plan in plans),
        mini_batches=tuple(plans),
        split_nodes=sum(plan.split_nodes for plan in plans),
        unfit_routes=sum(plan.unfit_routes for plan in plans),
    )


def _plan_update(
    trainable: Sequence[Sample],
    *,
    token_budget: int,
    channels: int,
    relay: bool,
    data_groups: int,
    route_shape: RouteShape | None,
) -> BatchPlan:
    """The plan of one update."""
    cost = pair_cost(channels)
    keys = route_keys(trainable, route_shape)
    make = partial(plan_trees, trainable, pair_cost=cost, keys=keys.of_samples if keys else ())
    plans = make(token_budget=token_budget, relay=relay)
    if data_groups > 1:
        plans = _for_groups(plans, make, token_budget, data_groups, pair_cost=cost)
    if keys is not None:
        plans = [keys.resolved(plan) for plan in plans]
    trajectories = trajectories_of(trainable)
    trees = tuple(
        build_tree_batch(
            plan,
            trainable,
            channels=channels,
            token_budget=token_budget,
            trajectories=trajectories,
            routes=keys.routes(plan) if keys else None,
        )
        for plan in plans
    )
    return BatchPlan(
        trees=trees,
        plan_s=0.0,
        samples=tuple(trainable),
        token_budget=token_budget,
        split_nodes=sum(map(split_nodes, plans)) if keys else 0,
        unfit_routes=keys.unfit_columns if keys else 0,
    )


def _for_groups(
    plans: list[TreePlan],
    make: Callable[..., list[TreePlan]],
    budget: int,
    groups: int,
    *,
    pair_cost: float,
) -> list[TreePlan]:
    """The best of several plans, which `make` makes, for groups that compute at the same time:
    smaller trees compute shared prefixes more often, larger ones leave groups without work."""
    best, least = plans, _span(plans, groups, pair_cost)
    tokens = sum(plan.tokens for plan in plans)
    fewest = max(1, -(-tokens // (budget * groups)))
    for rounds in range(fewest, fewest + TRIED_ROUNDS):
        smaller = min(budget, -(-tokens // (groups * rounds)))
        tried = make(token_budget=smaller, relay=False)
        fits = all(plan.tokens <= budget for plan in tried)
        if fits and (span := _span(tried, groups, pair_cost)) < least:
            best, least = tried, span
    return best


def _span(plans: Sequence[TreePlan], groups: int, pair_cost: float) -> float:
    costs = [TreeCost(work=plan.work(pair_cost), passes=len(plan.parts)) for plan in plans]
    return divide(costs, groups).span
