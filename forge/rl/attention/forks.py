"""Batches of tree nodes that a recurrent layer computes together.

Owns the batches of a part's nodes for layers whose state goes from token to token. A node begins
with the state after its parent's last token, so all nodes at one depth of the tree can be computed
at once, each from its own state. `forge.rl.model.forked_states` computes them.

Nodes of a batch have the same length, so that the state after each is that of its last token. Nodes
whose state nothing needs are padded to the next power of two and share batches. A single token is
padded, too, since layers have another path for it, which is not differentiable. If its state is
needed, the token is computed once more by each of the nodes after it: it is `pending`.

Shapes: B nodes of a batch, T tokens of each, L tokens of the part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from forge.core.prefix_tree import Node

ROOT = -1
"""In place of the parent's last token."""
State = dict[tuple[str, int], Tensor]
"""State of one recurrent layer after one token, by kind and number; each tensor has a batch of
1."""
Chain = tuple[int, int, int]
"""Start and end of a node's own tokens, and its parent's last token."""


class After(IntEnum):
    """Kind of the state after a node."""

    NOTHING = 0
    """Not needed."""
    PENDING = 1
    """That of its parent, with its token still to be computed."""
    STATE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkBatch:
    """Nodes that are computed together."""

    places_BT: Tensor
    """Index in the part of each token; padding repeats the last one."""
    parents: tuple[int, ...]
    """For each node, the token with the state that it begins with, in the part's layout with its
    prefix; `ROOT` without one. All are `ROOT` or none."""
    lasts: tuple[int, ...]
    """For each node, its last token, in the same layout."""
    after: After


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks:
    """The batches of a part, each after those with its parents."""

    batches: tuple[ForkBatch, ...]
    outputs_L: Tensor
    """Index of each token among the B T tokens of all batches in their order."""


def own_chains(nodes: Sequence[Node], *, prefix: int) -> list[Chain]:
    """The nodes of a part without its prefix; arguments are those of its attention schedule."""
    return [
        (max(node.start, prefix), node.end, prefix - 1 if node.start < prefix else node.parent)
        for node in nodes
        if node.end > prefix
    ]


def plan_forks(nodes: Sequence[Node], *, prefix: int, wanted: Container[int] = ()) -> Forks:
    """The batches of a part; `nodes` and `prefix` are those of its attention schedule, `wanted`
    are tokens with states that other parts begin with."""
    chains = own_chains(nodes, prefix=prefix)
    followed = {parent for _, _, parent in chains}
    levels: dict[int, int] = {}
    pending: dict[int, int] = {}
    grouped: dict[tuple[int, After, int, tuple[int, int]], list[Chain]] = defaultdict(list)
    for start, end, parent in chains:
        last, tokens = end - 1, end - start
        # Parents come first; those of the prefix are computed.
        levels[last] = levels.get(parent, -1) + 1
        after = After.NOTHING
        if last in followed or last in wanted:
            after = After.PENDING if tokens == 1 and parent != ROOT else After.STATE
        pending[last] = pending.get(parent, 0) + 1 if after is After.PENDING else 0
        size = tokens if after is After.STATE else max(2, 1 << (tokens - 1).bit_length())
        # Each node of a batch begins with the same number of pending tokens.
        elsewhere = ROOT < parent < prefix
        begin = (parent, 0) if elsewhere or parent == ROOT else (prefix, pending[parent])
        grouped[levels[last], after, size, begin].append((start, end, parent))
    batches, outputs_L, computed = [], torch.zeros(nodes[-1].end - prefix, dtype=torch.long), 0
    for (_, after, _, _), members in sorted(grouped.items()):
        longest = max(end - start for start, end, _ in members)
        size = longest if after is After.STATE else max(2, longest)
        rows = [torch.arange(start, start + size).clamp(max=end - 1) for start, end, _ in members]
        for start, end, _ in members:
            outputs_L[start - prefix : end - prefix] = computed + torch.arange(end - start)
            computed += size
        batches.append(
            ForkBatch(
                places_BT=torch.stack(rows) - prefix,
                parents=tuple(parent for _, _, parent in members),
                lasts=tuple(end - 1 for _, end, _ in members),
                after=after,
            )
        )
    return Forks(batches=tuple(batches), outputs_L=outputs_L)
