"""Divides a tree into one range per rank: equal work, within the memory of a rank.

Owns the ranges alone. `forge.rl.parallel.context_parallel` exchanges data between ranks;
`forge.core.prefix_tree` divides trees into the passes of one process.

Work is the number of tokens, each weighted by the tokens it attends. Memory is counted in tokens,
too, and bounded by `token_budget`: a rank's own tokens, plus the tokens of the path to its first
one, which hold only keys and values.

Shapes: L tokens of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from forge.core.prefix_tree import Span
from forge.rl.tree.parts import TreeLayout


def rank_spans(
    layout: TreeLayout, ranks: int, *, pair_cost: float, budget: int = 0, prefix_cost: float = 0.0
) -> list[Span]:
    """Ranges of equal work, some of them empty in a tiny tree.

    If one of them holds more than `budget` tokens (0: no bound), the ranges within the budget whose
    largest work is least; if there are none, the ranges whose largest memory is least.
    `prefix_cost` is the memory of a prefix token relative to an own token.
    """
    total = _cumulative_work(layout.positions_L, pair_cost)
    cuts = _equal_cuts(total, ranks)
    held = [held_tokens(layout, span, prefix_cost=prefix_cost) for span in _spans(cuts)]
    if not budget or max(held) <= budget:
        return _spans(cuts)
    bounds = _Bounds(torch.cat([total.new_zeros(1), total]), layout.positions_L, prefix_cost)
    everything = float(total[-1])
    memory = float(budget)
    if bounds.cuts(ranks, work=everything, memory=memory) is None:
        memory = bounds.least_memory(ranks, most=max(held))
    best = bounds.cuts(ranks, work=everything, memory=memory)
    low, high = everything / ranks, everything
    while high - low > 0.5:  # less than any token
        middle = (low + high) / 2
        found = bounds.cuts(ranks, work=middle, memory=memory)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    assert best is not None
    return _spans(best)


def largest_range(
    tokens: int, ranks: int, *, pair_cost: float, prefix_cost: float
) -> tuple[int, float]:
    """Tokens of the largest range of one sequence, and most tokens that a rank holds of it, as
    `held_tokens` counts them. Of all trees with as many tokens its ranges differ most."""
    cuts = _equal_cuts(_cumulative_work(torch.arange(tokens), pair_cost), ranks)
    spans = _spans(cuts)
    own = max(end - start for start, end in spans)
    return own, max(end - start + prefix_cost * start for start, end in spans)


def _cumulative_work(positions_L: Tensor, pair_cost: float) -> Tensor:
    work_L = 1 + pair_cost * (positions_L + 1).double()
    return work_L.cumsum(0)


def _equal_cuts(total: Tensor, ranks: int) -> list[int]:
    shares = total[-1] * torch.arange(1, ranks, dtype=torch.double) / ranks
    return [0, *torch.searchsorted(total, shares).tolist(), len(total)]


def held_tokens(layout: TreeLayout, span: Span, *, prefix_cost: float) -> float:
    """Estimate of the memory that a range's pass holds for its backward, in tokens."""
    start, end = span
    if start == end:
        return 0.0
    return end - start + prefix_cost * float(layout.positions_L[start])


def _spans(cuts: Sequence[int]) -> list[Span]:
    return list(pairwise(cuts))


class _Bounds:
    """Bounds on the end of a range, by its first token."""

    def __init__(self, total: Tensor, positions_L: Tensor, prefix_cost: float) -> None:
        """`total` [L + 1] is the cumulative work: before each token, and of all tokens."""
        self._total = total
        self._starts_L = torch.arange(len(positions_L))
        self._prefix_L = prefix_cost * positions_L.double()

    def cuts(self, ranks: int, *, work: float, memory: float) -> list[int] | None:
        """Boundaries of ranges within both bounds; None if there are none.

        A range that fits still fits when it ends earlier. So the first ranks can cover everything
        up to some token, and the next range begins where it reaches farthest.
        """
        tokens = len(self._starts_L)
        room_L = (memory - self._prefix_L).floor().clamp(min=0).long()
        by_work_L = torch.searchsorted(self._total, self._total[:-1] + work, right=True) - 1
        ends_L = torch.minimum(self._starts_L + room_L, by_work_L).clamp(max=tokens)
        farthest_L, begins_L = torch.maximum(ends_L, self._starts_L).cummax(0)
        covered = [0]
        for _ in range(ranks):
            last = covered[-1]
            covered.append(int(farthest_L[last]) if last < tokens else tokens)
        if covered[-1] < tokens:
            return None
        cuts = [tokens]
        for last in reversed(covered[:-1]):
            # Empty if the ranks before can cover its end.
            cuts.append(int(begins_L[last]) if last < cuts[-1] else cuts[-1])
        return cuts[::-1]

    def least_memory(self, ranks: int, *, most: float) -> float:
        """The least bound on memory with valid ranges, to half a token; `most` is sufficient up to
        rounding."""
        low, high = 0.0, most + 0.5
        while high - low > 0.5:
            middle = (low + high) / 2
            found = self.cuts(ranks, work=float(self._total[-1]), memory=middle)
            low, high = (middle, high) if found is None else (low, middle)
        return high
