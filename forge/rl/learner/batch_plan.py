"""A batch of samples, merged into prefix trees and ready for the learner.

Owns the plan of a whole batch and its counts. One tree is `forge.rl.tree.batch`;
`forge.core.prefix_tree` divides samples into trees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forge.core.prefix_tree import Sample, TreePlan, plan_trees
from forge.rl.losses.objective import BatchSize
from forge.rl.model.capabilities import pair_cost
from forge.rl.parallel.rounds import TreeCost, divide
from forge.rl.tree.batch import TreeBatch, build_tree_batch, trajectories_of

TRIED_ROUNDS = 4
"""Numbers of trees per data group that a plan is tried with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A planned batch, made before its step, on any thread."""

    trees: tuple[TreeBatch, ...]
    plan_s: float
    samples: tuple[Sample, ...] = ()
    """The merged samples, for another plan with another budget."""
    token_budget: int = 0

    @property
    def largest_tree(self) -> int:
        """Tokens of the largest pass, which determine the memory."""
        return max((tree.pass_tokens for tree in self.trees), default=0)

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of all samples."""
        return sum(tree.trained_tokens for tree in self.trees)

    @property
    def size(self) -> BatchSize:
        """Denominators of the loss."""
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
        apart = sum(len(torch.unique(tree.trajectories_S)) for tree in self.trees)
        return apart > self.size.trajectories

    @property
    def tree_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(tree.tokens for tree in self.trees)

    @property
    def sample_tokens(self) -> int:
        """Tokens that would be computed without merging."""
        return sum(tree.sample_tokens for tree in self.trees)


def plan_batch(
    samples: Sequence[Sample],
    *,
    token_budget: int,
    channels: int,
    relay: bool = True,
    data_groups: int = 1,
) -> BatchPlan:
    """Merge a batch's samples into trees, on any thread; needs no weights.

    `channels` is `attention_channels` of the model; ranks that share trees do not `relay`. With
    several data groups the trees are those that the groups finish earliest. Raises
    `InvalidArgument` for a malformed sample.
    """
    began = time.perf_counter()
    for sample in samples:
        sample.validate()
    trainable = [sample for sample in samples if sample.trained]
    cost = pair_cost(channels)
    plans = plan_trees(trainable, token_budget=token_budget, pair_cost=cost, relay=relay)
    if data_groups > 1:
        plans = _for_groups(plans, trainable, token_budget, data_groups, pair_cost=cost)
    trajectories = trajectories_of(trainable)
    trees = tuple(
        build_tree_batch(
            plan,
            trainable,
            channels=channels,
            token_budget=token_budget,
            trajectories=trajectories,
        )
        for plan in plans
    )
    return BatchPlan(
        trees=trees,
        plan_s=time.perf_counter() - began,
        samples=tuple(trainable),
        token_budget=token_budget,
    )


def _for_groups(
    plans: list[TreePlan],
    samples: Sequence[Sample],
    budget: int,
    groups: int,
    *,
    pair_cost: float,
) -> list[TreePlan]:
    """The best of several plans for groups that compute at the same time: smaller trees compute
    shared prefixes more often, larger ones leave groups without work."""
    best, least = plans, _span(plans, groups, pair_cost)
    tokens = sum(plan.tokens for plan in plans)
    fewest = max(1, -(-tokens // (budget * groups)))
    for rounds in range(fewest, fewest + TRIED_ROUNDS):
        smaller = min(budget, -(-tokens // (groups * rounds)))
        tried = plan_trees(samples, token_budget=smaller, pair_cost=pair_cost, relay=False)
        fits = all(plan.tokens <= budget for plan in tried)
        if fits and (span := _span(tried, groups, pair_cost)) < least:
            best, least = tried, span
    return best


def _span(plans: Sequence[TreePlan], groups: int, pair_cost: float) -> float:
    costs = [TreeCost(work=plan.work(pair_cost), passes=len(plan.parts)) for plan in plans]
    return divide(costs, groups).span
