"""The part of a planned batch that one data group computes, as its ranks receive it.

Owns dividing a plan on rank 0, and joining a part to a plan on another rank. Ranks that receive a
part plan nothing and hold no tokens of other groups. Passes are not sent: they repeat the layout,
and each rank cuts its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from forge.core.prefix_tree import Span
from forge.core.routes import RouteShape
from forge.rl.learner.batch_plan import BatchPlan, Outline, joined
from forge.rl.learner.share import group_trees, rounds_of
from forge.rl.model.policy import TreePolicy
from forge.rl.tree.batch import TreeBatch
from forge.rl.tree.parts import cut_part


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUpdate:
    """The part of one update."""

    trees: tuple[TreeBatch, ...]
    """One of each round, without their passes."""
    spans: tuple[tuple[Span, ...], ...]
    """Layout range of each pass, per tree."""
    outline: Outline
    token_budget: int

    def plan(self, route_shape: RouteShape | None) -> BatchPlan:
        """The part as the plan of an update."""
        return BatchPlan(
            trees=tuple(map(with_passes, self.trees, self.spans)),
            plan_s=0.0,
            token_budget=self.token_budget,
            route_shape=route_shape,
            outline=self.outline,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The part of one data group in a batch."""

    updates: tuple[GroupUpdate, ...]
    route_shape: RouteShape | None

    @property
    def tree_tokens(self) -> int:
        """Tokens that the group computes, without those of empty passes."""
        return sum(tree.tokens for one in self.updates for tree in one.trees if tree.trained_tokens)

    def plan(self) -> BatchPlan:
        """The part as a plan for `forge.rl.learner.learner.Learner.step`."""
        plans = [one.plan(self.route_shape) for one in self.updates]
        if len(plans) == 1:
            return plans[0]
        return replace(joined(plans, plan_s=0.0), route_shape=self.route_shape)


def group_plans(plan: BatchPlan, policy: TreePolicy) -> list[GroupPlan]:
    """The part of each data group of the policy's world, whose ranks all shard parameters.

    The groups of a world with whole parameters retry a batch after a shortage of memory in smaller
    trees, and need its samples for that.
    """
    parts = [list(_updates(update, policy)) for update in plan.updates]
    return [
        GroupPlan(updates=updates, route_shape=plan.route_shape)
        for updates in zip(*parts, strict=True)
    ]


def _updates(update: BatchPlan, policy: TreePolicy) -> Iterator[GroupUpdate]:
    trees = [policy.arranged(tree) for tree in update.trees]
    rounds = rounds_of(trees, policy)
    for group in range(policy.world.shape.data_groups):
        own = group_trees(rounds, trees, group, policy)
        yield GroupUpdate(
            trees=tuple(replace(tree, parts=()) for tree, _ in own),
            spans=tuple(spans_of(tree) for tree, _ in own),
            outline=Outline(
                size=update.size,
                divides_trajectories=update.divides_trajectories,
                passes=tuple(passes for _, passes in own),
            ),
            token_budget=update.token_budget,
        )


def spans_of(tree: TreeBatch) -> tuple[Span, ...]:
    """Layout range of each pass of a tree."""
    return tuple(part.span for part in tree.parts)


def with_passes(tree: TreeBatch, spans: Sequence[Span]) -> TreeBatch:
    """A tree that was sent without its passes, with those of the layout ranges."""
    return replace(tree, parts=tuple(cut_part(tree.layout, span) for span in spans))
