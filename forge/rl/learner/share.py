"""The part of a batch that one rank computes, and the results of all parts together.

Owns dividing a planned batch over the data groups of a world; `forge.rl.learner.group_plans` makes
the parts that other ranks receive. A world of one data group computes all trees in their order.

Shapes: T trained tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from forge.rl.learner.critic import Credit
from forge.rl.losses.objective import PassLoss
from forge.rl.losses.stats import TokenStats
from forge.rl.losses.tokens import TrainedTokens
from forge.rl.model.capabilities import pair_cost
from forge.rl.model.policy import TreePolicy
from forge.rl.parallel.rounds import Rounds, TreeCost, divide
from forge.rl.parallel.world import World
from forge.rl.tree.batch import TreeBatch, idle_tree

Columns = TypeVar("Columns", TokenStats, Credit)


@dataclass(slots=True, kw_only=True)
class Frozen:
    """Log-probs of a tree that stay fixed over the update passes of a batch."""

    old: Tensor
    reference: Tensor | None
    teacher: Tensor | None
    credit: Credit | None
    """With a critic: advantages and values at the beginning of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The trees of one rank, in order."""

    trees: tuple[tuple[TreeBatch, int], ...]
    """Each with its number of passes; 0: as many as it has."""
    empty_passes: int = 0
    """Over all ranks."""
    imbalance: float = 0.0


def share_of(trees: Sequence[TreeBatch], policy: TreePolicy) -> Share:
    """The share of this rank in the trees of a batch, which `policy.arranged` returned."""
    world = policy.world
    if world.shape.data_groups == 1 and not world.shape.sharded:
        return Share(trees=tuple((tree, 0) for tree in trees))
    rounds = rounds_of(trees, policy)
    return Share(
        trees=tuple(group_trees(rounds, trees, world.data_group, policy)),
        empty_passes=rounds.empty_passes if world.shape.sharded else 0,
        imbalance=rounds.imbalance,
    )


def rounds_of(trees: Sequence[TreeBatch], policy: TreePolicy) -> Rounds:
    """The trees of a batch, which `policy.arranged` returned, divided over data groups."""
    weight = pair_cost(policy.channels)
    shape = policy.world.shape
    costs = [
        TreeCost(work=tree.work(weight), passes=policy.passes(tree) if shape.sharded else 1)
        for tree in trees
    ]
    return divide(costs, shape.data_groups)


def group_trees(
    rounds: Rounds, trees: Sequence[TreeBatch], group: int, policy: TreePolicy
) -> list[tuple[TreeBatch, int]]:
    """The trees of one data group, one of each round, with their passes."""
    own = []
    for one in rounds.rounds:
        index = one.trees[group]
        tree = idle_tree(policy.channels) if index is None else trees[index]
        # Ranks with all parameters meet only after the batch: each runs its own passes.
        own.append((tree, one.passes if policy.world.shape.sharded else 0))
    return own


def of_all(own: Sequence[Columns], world: World) -> list[Columns]:
    """The columns of all data groups on rank 0."""
    return list(own) if world.data is None else world.gathered([_on_host(one) for one in own])


def _on_host(columns: Columns) -> Columns:
    moved: dict[str, Any] = {
        field.name: value.detach().cpu()
        for field in fields(columns)
        if isinstance(value := getattr(columns, field.name), Tensor)
    }
    return replace(columns, **moved)


def token_stats(tree: TreeBatch, tokens: TrainedTokens, share: PassLoss) -> TokenStats:
    """Statistics of a tree, after its backward."""
    return TokenStats(
        logprobs=tokens.logprobs.detach(),
        behavior=tree.behavior_T,
        entropy=tokens.entropy.detach(),
        versions=tree.versions_T,
        clipped=share.clipped,
        masked=share.masked,
        reference_kl=share.reference_kl,
        teacher_gaps=share.teacher_gaps,
        gradient_size=_gradient_size(tokens.logprobs),
        lengths=tree.lengths_S,
        advantages=tokens.advantages.detach(),
        domains=tree.domains_S,
        engines=tree.engines_S,
        numbers=tree.numbers_S,
    )


def _gradient_size(logprobs_T: Tensor) -> Tensor:
    """|d loss / d log pi| of each token, after the backward."""
    gradient_T = logprobs_T.grad
    return torch.zeros_like(logprobs_T) if gradient_T is None else gradient_T.abs()
