"""How the attention of one tree is cut into dense kernel calls.

Owns the choice between few large calls and little masked work. The calls themselves are
`forge.rl.tree_attention`.

Every call has a fixed cost, worth some thousands of query-key pairs on a CPU, while trees of short
answers have hundreds of nodes of a few tokens. So a run of small neighbouring subtrees becomes one
block with a dense mask wherever the masked pairs cost less than the calls they replace; long
chains stay causal calls and full slabs, which compute no masked pair at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from forge.core.packing import Node

CALL_FLOPS = 6e6
"""Fixed cost of one call, forward and backward, in what a CPU core computes meanwhile."""
CHAIN_TOKENS = 192
"""Longest causal call. Longer chains are halved into two and a slab: the CPU kernel computes much
of what a causal mask hides (a chain of 1,024 runs 1.2 times as fast, one of 512 1.4 times)."""
PAIR_FLOPS = 14
"""Forward and backward operations per query-key pair and channel: seven products of 2 FLOPs."""


class Block(NamedTuple):
    """A layout range that attends itself in one call."""

    start: int
    end: int
    causal: bool
    """One chain; otherwise a run of sibling subtrees under a mask."""


class Slab(NamedTuple):
    """Keys `[start, end)` of a chain, attended by all that follows it, `[end, subtree_end)`."""

    start: int
    end: int
    subtree_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSchedule:
    """The calls of one tree. The blocks tile the layout."""

    tokens: int
    depth: int
    """Tokens of the longest root-to-leaf path."""
    blocks: tuple[Block, ...]
    slabs: tuple[Slab, ...]
    ancestry: dict[Block, Tensor]
    """Boolean [n, n] of each block that is not causal: may query i see key j?"""
    _masks: dict[tuple[Block, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, block: Block, like: Tensor) -> Tensor | None:
        """Additive mask of a block in the type of `like`; None for a causal one."""
        if block.causal:
            return None
        key = (block, like.dtype)
        if key not in self._masks:
            visible = self.ancestry[block]
            hidden = torch.zeros(visible.shape, dtype=like.dtype).masked_fill(
                ~visible, float("-inf")
            )
            self._masks[key] = hidden[None, None]
        return self._masks[key]


def schedule_attention(nodes: Sequence[Node], *, channels: int) -> AttentionSchedule:
    """Cut the attention over `nodes` (a plan's, in layout order) into calls.

    `channels` is query heads times head size: the wider the attention, the more a masked pair
    costs against a call.
    """
    scheduler = _Scheduler(nodes, call_pairs=CALL_FLOPS / (PAIR_FLOPS * channels))
    blocks = scheduler.blocks()
    return AttentionSchedule(
        tokens=nodes[-1].end,
        depth=max(node.depth + node.end - node.start for node in nodes),
        blocks=tuple(blocks),
        slabs=tuple(scheduler.slabs),
        ancestry={block: _ancestry(nodes, block) for block in blocks if not block.causal},
    )


class _Scheduler:
    """Bottom-up choice, per subtree, of one masked block or a chain, a slab and its children."""

    def __init__(self, nodes: Sequence[Node], *, call_pairs: float) -> None:
        self._nodes = nodes
        self._call_pairs = call_pairs
        self._children: list[list[int]] = [[] for _ in nodes]
        self._roots: list[int] = []
        self._whole = [True] * len(nodes)
        self._cost = [0.0] * len(nodes)
        self.slabs: list[Slab] = []
        by_last_token = {node.end - 1: index for index, node in enumerate(nodes)}
        for index, node in enumerate(nodes):
            siblings = (
                self._roots if node.parent < 0 else self._children[by_last_token[node.parent]]
            )
            siblings.append(index)
        for index in reversed(range(len(nodes))):
            self._choose(index)

    def blocks(self) -> list[Block]:
        """The blocks in layout order; fills `slabs` on the way."""
        blocks: list[Block] = []
        pending = [self._roots]
        while pending:
            for run in self._runs(pending.pop()):
                first, last = self._nodes[run[0]], self._nodes[run[-1]]
                if not self._whole[run[0]]:
                    blocks.extend(self._chain(first.start, first.end))
                    self.slabs.append(Slab(first.start, first.end, first.subtree_end))
                    pending.append(self._children[run[0]])
                elif len(run) == 1 and first.end == first.subtree_end:
                    blocks.extend(self._chain(first.start, first.end))
                else:
                    blocks.append(Block(first.start, last.subtree_end, False))
        return sorted(blocks)

    def _chain(self, start: int, end: int) -> Iterator[Block]:
        """Causal blocks of `[start, end)`; adds the slabs between them."""
        if end - start <= CHAIN_TOKENS:
            yield Block(start, end, True)
            return
        middle = start + (end - start) // 2
        self.slabs.append(Slab(start, middle, end))
        yield from self._chain(start, middle)
        yield from self._chain(middle, end)

    def _choose(self, index: int) -> None:
        start, end, subtree_end, _, _ = self._nodes[index]
        chain = self._call_pairs + (end - start) ** 2 / 2
        if end == subtree_end:
            self._cost[index] = chain
            return
        whole = self._call_pairs + (subtree_end - start) ** 2
        slab = self._call_pairs + (end - start) * (subtree_end - end)
        apart = chain + slab + sum(map(self._run_cost, self._runs(self._children[index])))
        self._whole[index] = whole <= apart
        self._cost[index] = min(whole, apart)

    def _runs(self, siblings: Sequence[int]) -> list[list[int]]:
        """Siblings, grouped where one masked block of both costs less than one more call."""
        runs: list[list[int]] = []
        tokens = 0  # of the newest run; 0 when it must not grow
        for index in siblings:
            size = self._nodes[index].subtree_end - self._nodes[index].start
            if self._whole[index] and tokens and 2 * tokens * size < self._call_pairs:
                runs[-1].append(index)
                tokens += size
            else:
                runs.append([index])
                tokens = size if self._whole[index] else 0
        return runs

    def _run_cost(self, run: Sequence[int]) -> float:
        if len(run) == 1:
            return self._cost[run[0]]
        tokens = self._nodes[run[-1]].subtree_end - self._nodes[run[0]].start
        return self._call_pairs + float(tokens * tokens)


def _ancestry(nodes: Sequence[Node], block: Block) -> Tensor:
    size = block.end - block.start
    visible = torch.ones(size, size, dtype=torch.bool).tril_()
    # Within a chain everything earlier is an ancestor; after a subtree nothing of it is.
    first = bisect_left(nodes, (block.start,))
    for node in nodes[first:]:
        if node.start >= block.end:
            break
        start, end, subtree_end = (place - block.start for place in node[:3])
        visible[subtree_end:, start:end] = False
    return visible
