"""Divides the trees of a batch over data groups: equal numbers of passes, equal work.

Owns the plan alone; it has no communication. Ranks that shard parameters gather every layer
together, so they must run the same number of passes in the same order, and wait for the slowest in
each. A round is one tree per data group. A group without a tree in a round, or with one of fewer
passes, computes empty passes: one token without effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCost:
    """Cost of a tree for its data group."""

    work: float
    """In tokens, each weighted by the tokens it attends."""
    passes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The trees that the data groups compute at the same time."""

    trees: tuple[int | None, ...]
    """Index of the tree of each data group."""
    passes: int
    """Passes that every group runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """A batch, divided over data groups."""

    rounds: tuple[Round, ...]
    empty_passes: int
    """Passes without effect, over all groups."""
    imbalance: float
    """Time that groups wait for each other, as a share of the time that they compute."""
    span: float
    """Work of the largest tree of each round, summed: the time of the batch."""


def divide_own(costs: Sequence[Sequence[TreeCost]]) -> Rounds:
    """Rounds of data groups that have trees of their own: `costs` per group. The trees of a round
    are indices into those of their groups, each group's of most passes and most work first."""
    orders = [
        sorted(range(len(own)), key=lambda index: (-own[index].passes, -own[index].work, index))
        for own in costs
    ]
    rounds, span = [], 0.0
    for number in range(max(map(len, orders), default=0)):
        trees = tuple(order[number] if number < len(order) else None for order in orders)
        present = [own[tree] for own, tree in zip(costs, trees, strict=True) if tree is not None]
        rounds.append(Round(trees=trees, passes=max(one.passes for one in present)))
        span += max(one.work for one in present)
    return _rounds(rounds, [one for own in costs for one in own], groups=len(costs), span=span)


def divide(costs: Sequence[TreeCost], groups: int) -> Rounds:
    """Trees in rounds of `groups`, those of most passes first, then those of most work.

    Trees of similar work are in one round, which gives the least sum over rounds of the largest
    work. The groups take turns in getting a round's largest tree.
    """
    order = sorted(
        range(len(costs)), key=lambda index: (-costs[index].passes, -costs[index].work, index)
    )
    rounds = []
    for number, first in enumerate(range(0, len(order), groups)):
        chosen: list[int | None] = [*order[first : first + groups]]
        passes = max(costs[index].passes for index in order[first : first + groups])
        chosen += [None] * (groups - len(chosen))
        turn = number % groups
        rounds.append(Round(trees=(*chosen[-turn:], *chosen[:-turn]), passes=passes))
    works = [[costs[index].work for index in one.trees if index is not None] for one in rounds]
    span = sum(map(max, works))
    return _rounds(rounds, costs, groups=groups, span=span)


def _rounds(
    rounds: Sequence[Round], costs: Sequence[TreeCost], *, groups: int, span: float
) -> Rounds:
    total = sum(one.work for one in costs)
    run = groups * sum(one.passes for one in rounds)
    return Rounds(
        rounds=tuple(rounds),
        empty_passes=run - sum(one.passes for one in costs),
        imbalance=groups * span / total - 1.0 if total else 0.0,
        span=span,
    )
