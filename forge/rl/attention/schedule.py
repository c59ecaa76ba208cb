"""Divides the attention of one tree into dense kernel calls.

Owns the trade-off between few large calls and few masked pairs. `forge.rl.attention.tree_attention`
makes the calls.

Every call has a fixed cost, equal to some thousands of query-key pairs on a CPU, and trees of short
answers have hundreds of nodes of a few tokens. So a run of small neighboring subtrees becomes one
block with a dense mask if its masked pairs cost less than the calls it replaces. Long chains remain
causal calls and full slabs, which compute no masked pair.

A layout may begin with a *prefix*: ancestors that are attended but have no queries, because another
pass or rank computes them. The prefix is a chain: the path to the first token after it.

Shapes: K tokens of the layout, prefix included: the keys, and after the prefix also the queries;
N queries of a call, M keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forge.core.prefix_tree import Node, Span

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CALL_FLOPS = 6e6
"""Fixed cost of one call, forward and backward, in operations of a CPU core."""
CHAIN_TOKENS = 192
"""Longest causal call. Longer chains are divided into two halves and a slab: in a causal call the
CPU kernel computes many masked pairs (a chain of 1,024 is 1.2 times as fast divided, 512 1.4)."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sight:
    """Visibility of a call's keys, stored as a few numbers per token instead of a mask."""

    places_N: Tensor
    """Layout indices of the queries."""
    places_M: Tensor
    """Layout indices of the keys."""
    ends_M: Tensor
    """Ends of the keys' subtrees."""
    firsts_N: Tensor | None = None
    """Position of the first key in each query's window; None without windows."""
    positions_M: Tensor | None = None
    """Positions of the keys; None without windows."""

    def visible(self) -> Tensor:
        """Boolean [N, M]: whether the key is the query or an ancestor of it, in its window."""
        seen_NM = self.places_N[:, None] < self.ends_M
        seen_NM &= self.places_M <= self.places_N[:, None]
        if self.firsts_N is not None and self.positions_M is not None:
            seen_NM &= self.positions_M >= self.firsts_N[:, None]
        return seen_NM

    def mask(self, like: Tensor) -> Tensor:
        """Additive, [1, 1, N, M], in the type and on the device of `like`."""
        mask_NM = torch.zeros(len(self.places_N), len(self.places_M), dtype=like.dtype)
        mask_NM.masked_fill_(self.visible().logical_not_(), float("-inf"))
        return mask_NM[None, None].to(like.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelCall:
    """One dense kernel call."""

    queries: slice
    """Range of queries, which excludes the prefix."""
    keys: slice | Tensor
    """A layout range, or layout indices."""
    causal: bool = False
    sight: Sight | None = None
    """None: all keys are visible, or the causal ones."""
    merges: bool = False
    """An earlier call has computed the same queries over other keys."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSchedule:
    """The calls of one tree. The blocks tile the layout after the prefix."""

    tokens: int
    """K."""
    prefix: int
    """Number of prefix tokens, which have keys but no queries."""
    depth: int
    """Tokens of the longest root-to-leaf path."""
    nodes: tuple[Node, ...]
    blocks: tuple[Block, ...]
    slabs: tuple[Slab, ...]
    ends_K: Tensor
    """End of each token's subtree: query q attends key k if k <= q < ends_K[k]."""
    positions_K: Tensor
    block_masks: dict[tuple[int, torch.device], BlockMask] = field(default_factory=dict)
    """Cache of `forge.rl.attention.flex`, by window and device."""
    _calls: dict[int, tuple[KernelCall, ...]] = field(default_factory=dict)

    def calls(self, window: int | None = None) -> tuple[KernelCall, ...]:
        """The calls of full attention, or of a window of `window` tokens including the query."""
        size = 0 if window is None or window >= self.depth else window
        if size not in self._calls:
            made = self._windowed(size) if size else self._full()
            self._calls[size] = tuple(made)
        return self._calls[size]

    def _full(self) -> Iterator[KernelCall]:
        for block in self.blocks:
            span = slice(block.start, block.end)
            sight = None
            if not block.causal:
                places = torch.arange(block.start, block.end, dtype=torch.int32)
                sight = Sight(places_N=places, places_M=places, ends_M=self.ends_K[span].int())
            yield KernelCall(
                queries=self._queries(span), keys=span, causal=block.causal, sight=sight
            )
        for start, end, subtree_end in self.slabs:
            queries = slice(max(end, self.prefix), subtree_end)
            yield KernelCall(queries=self._queries(queries), keys=slice(start, end), merges=True)

    def _windowed(self, window: int) -> Iterator[KernelCall]:
        """One masked call per block, over the block and its gathered ancestors in the window."""
        for block in self.blocks:
            reach = int(self.positions_K[block.start : block.end].min()) - window + 1
            spans = [*ancestors(self.nodes, block.start, reach), (block.start, block.end)]
            keys = torch.cat([torch.arange(*span) for span in spans])
            span = slice(block.start, block.end)
            sight = Sight(
                places_N=torch.arange(block.start, block.end, dtype=torch.int32),
                places_M=keys.int(),
                ends_M=self.ends_K[keys].int(),
                firsts_N=self.positions_K[span].int() - window + 1,
                positions_M=self.positions_K[keys].int(),
            )
            yield KernelCall(queries=self._queries(span), keys=keys, sight=sight)

    def _queries(self, span: slice) -> slice:
        return slice(span.start - self.prefix, span.stop - self.prefix)


def ancestors(nodes: Sequence[Node], place: int, reach: int = 0) -> list[Span]:
    """Layout ranges of the ancestors of a token at positions from `reach` on, root first."""
    spans: list[Span] = []
    node = holder(nodes, place)
    last = place - 1 if place > node.start else node.parent
    while last >= 0:
        node = holder(nodes, last)
        first = max(node.start, node.start + reach - node.depth)
        if first > last:
            break
        spans.append((first, last + 1))
        last = node.parent
    return spans[::-1]


def holder(nodes: Sequence[Node], place: int) -> Node:
    """The node of a token."""
    return nodes[bisect_right(nodes, (place, nodes[-1].end + 1)) - 1]


def schedule_attention(
    nodes: Sequence[Node], *, channels: int, prefix: int = 0
) -> AttentionSchedule:
    """Divide the attention over `nodes` (in layout order) into calls.

    `channels` is query heads times head size: with more channels a masked pair costs more relative
    to a call. The first `prefix` tokens have no queries.
    """
    first = bisect_left(nodes, (prefix,))
    scheduler = _Scheduler(nodes[first:], call_pairs=CALL_FLOPS / (PAIR_FLOPS * channels))
    blocks = scheduler.blocks()
    lengths = torch.tensor([node.end - node.start for node in nodes])
    starts = torch.tensor([node.depth - node.start for node in nodes])
    tokens = nodes[-1].end
    return AttentionSchedule(
        tokens=tokens,
        prefix=prefix,
        depth=max(node.depth + node.end - node.start for node in nodes),
        nodes=tuple(nodes),
        blocks=tuple(blocks),
        slabs=(*_prefix_slabs(nodes[:first]), *scheduler.slabs),
        ends_K=torch.tensor([node.subtree_end for node in nodes]).repeat_interleave(lengths),
        positions_K=starts.repeat_interleave(lengths) + torch.arange(tokens),
    )


def _prefix_slabs(nodes: Sequence[Node]) -> Iterator[Slab]:
    """Slabs of the prefix chain, divided where subtrees end."""
    for index, node in enumerate(nodes):
        following = nodes[index + 1] if index + 1 < len(nodes) else None
        if following is None or following.subtree_end != node.subtree_end:
            begun = [other.start for other in nodes if other.subtree_end == node.subtree_end]
            yield Slab(begun[0], node.end, node.subtree_end)


class _Scheduler:
    """Chooses bottom-up, per subtree: one masked block, or a chain, a slab and its children."""

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
            parent = by_last_token.get(node.parent)
            (self._roots if parent is None else self._children[parent]).append(index)
        for index in reversed(range(len(nodes))):
            self._choose(index)

    def blocks(self) -> list[Block]:
        """The blocks in layout order; also fills `slabs`."""
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
        """Siblings, grouped if one masked block of them costs less than one more call."""
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
