"""Parts of a merged layout, each for one forward pass.

Owns the division of a layout into ranges, each with the path to its first token, and into single
sequences. `forge.core.prefix_tree` or `forge.rl.parallel.partition` choose the ranges;
`forge.rl.tree.kv_relay` or `forge.rl.parallel.context_parallel` provide the path's keys and values.

In depth-first order every ancestor outside of a range is an ancestor of the range's first token. So
a range needs only one path of the rest of the tree.

Shapes: L layout tokens, P tokens of a part's prefix, R logit rows, E distinct edges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forge.core.prefix_tree import Node, Span
from forge.rl.attention.schedule import AttentionSchedule, ancestors, holder, schedule_attention
from forge.rl.tree.routes import TreeRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """The log-probs to compute: one logit row per distinct context, one entry per edge."""

    places_R: Tensor
    """Token index of each row, ascending."""
    temperatures_R: Tensor
    """Float32 sampling temperature of each row."""
    rows_E: Tensor
    """Row of each edge, ascending."""
    targets_E: Tensor
    """Target token id of each edge."""

    def cut(self, first: int, last: int) -> tuple[HeadRows, slice]:
        """The rows [first, last), and the range of their edges."""
        bounds = torch.tensor([first, last], device=self.rows_E.device)
        begin, stop = torch.searchsorted(self.rows_E, bounds).tolist()
        rows = HeadRows(
            places_R=self.places_R[first:last],
            temperatures_R=self.temperatures_R[first:last],
            rows_E=_lowered(self.rows_E[begin:stop], first),
            targets_E=self.targets_E[begin:stop],
        )
        return rows, slice(begin, stop)

    def every(self, step: int, first: int) -> tuple[HeadRows, Tensor]:
        """Every `step`-th row from `first` on, and the places of their edges."""
        edges = (self.rows_E % step == first).nonzero()[:, 0]
        rows = HeadRows(
            places_R=self.places_R[first::step].contiguous(),
            temperatures_R=self.temperatures_R[first::step],
            rows_E=self.rows_E[edges] // step,
            targets_E=self.targets_E[edges],
        )
        return rows, edges

    def to(self, device: torch.device) -> HeadRows:
        """These rows on `device`."""
        return HeadRows(
            places_R=self.places_R.to(device),
            temperatures_R=self.temperatures_R.to(device),
            rows_E=self.rows_E.to(device),
            targets_E=self.targets_E.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """A whole tree, as tensors."""

    nodes: tuple[Node, ...]
    ids_L: Tensor
    positions_L: Tensor
    """Depth of each token: its position in every sample that contains it."""
    weights_L: Tensor
    """Number of samples that contain each token."""
    head: HeadRows
    channels: int
    """Query heads times head size of the model."""
    routes: TreeRoutes | None = None
    """Recorded experts; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePart:
    """The inputs of one forward pass."""

    ids_L: Tensor
    positions_L: Tensor
    weights_L: Tensor
    """Float; weight of each token in sums over tokens of samples."""
    schedule: AttentionSchedule
    head: HeadRows
    """The part's rows, indexed within it."""
    edges_E: Tensor
    """Indices of its edges in the tree."""
    places_L: Tensor
    """Layout index of each of its tokens."""
    prefix_P: Tensor
    """Layout indices of the earlier tokens that it attends: a path from the root."""
    routes: TreeRoutes | None = None
    """Recorded experts of its tokens; None without any."""

    @property
    def tokens(self) -> int:
        """Tokens of the pass, without the prefix."""
        return self.ids_L.shape[0]

    @property
    def span(self) -> Span:
        """Layout range of a part that `cut_part` returned."""
        start = int(self.places_L[0])
        return start, start + self.tokens


def cut_part(layout: TreeLayout, span: Span) -> TreePart:
    """The part of a layout in a range."""
    start, end = span
    path = ancestors(layout.nodes, start)
    prefix = sum(stop - begin for begin, stop in path)
    nodes = part_nodes(layout, span)
    bounds = torch.tensor([start, end])
    head, edges = layout.head.cut(*torch.searchsorted(layout.head.places_R, bounds).tolist())
    return TreePart(
        ids_L=layout.ids_L[start:end],
        positions_L=layout.positions_L[start:end],
        weights_L=layout.weights_L[start:end],
        schedule=schedule_attention(nodes, channels=layout.channels, prefix=prefix),
        head=replace(head, places_R=_lowered(head.places_R, start)),
        edges_E=torch.arange(edges.start, edges.stop),
        places_L=torch.arange(start, end),
        prefix_P=_indices(path),
        routes=layout.routes and layout.routes.at(slice(start, end)),
    )


def part_nodes(layout: TreeLayout, span: Span) -> tuple[Node, ...]:
    """The nodes of a part's own layout: the path to its first token, then its range."""
    path = ancestors(layout.nodes, span[0])
    prefix = sum(stop - begin for begin, stop in path)
    return (
        *_path_nodes(layout.nodes, path, span, prefix),
        *_own_nodes(layout.nodes, span, prefix),
    )


def idle_part(layout: TreeLayout) -> TreePart:
    """A part of one token without effect: a rank without work must join every exchange."""
    part = cut_part(layout, (0, 1))
    return replace(
        part,
        weights_L=torch.zeros_like(part.weights_L),
        edges_E=part.edges_E[:0],
        places_L=part.places_L[:0],
        routes=None,
        head=part.head.cut(0, 0)[0],
    )


def with_empty(layout: TreeLayout, parts: Sequence[TreePart], passes: int) -> list[TreePart]:
    """The parts after as many idle ones as give that number of passes. The last pass keeps its
    activations and is computed once, so it is not an idle one."""
    empty = max(0, passes - len(parts))
    return [*[idle_part(layout)] * empty, *parts]


def _lowered(indices: Tensor, by: int) -> Tensor:
    """Indices less `by`, without a copy if it is 0."""
    return indices - by if by else indices


def single_sequences(layout: TreeLayout) -> Iterator[TreePart]:
    """The tree as root-to-leaf sequences; each row and weight is in exactly one of them."""
    head = layout.head
    seen_L = torch.zeros(len(layout.ids_L), dtype=torch.bool)
    for node in layout.nodes:
        if node.end != node.subtree_end:
            continue
        places_L = _indices([*ancestors(layout.nodes, node.end - 1), (node.end - 1, node.end)])
        fresh_L = torch.zeros_like(seen_L)
        fresh_L[places_L] = ~seen_L[places_L]
        seen_L[places_L] = True
        rows_R = fresh_L[head.places_R].nonzero()[:, 0]
        edges_E = torch.isin(head.rows_E, rows_R).nonzero()[:, 0]
        tokens = len(places_L)
        chain = Node(0, tokens, tokens, 0, -1)
        yield TreePart(
            ids_L=layout.ids_L[places_L],
            positions_L=layout.positions_L[places_L],
            weights_L=layout.weights_L[places_L] * fresh_L[places_L],
            schedule=schedule_attention([chain], channels=layout.channels),
            head=HeadRows(
                places_R=layout.positions_L[head.places_R[rows_R]],
                temperatures_R=head.temperatures_R[rows_R],
                rows_E=torch.searchsorted(rows_R, head.rows_E[edges_E]),
                targets_E=head.targets_E[edges_E],
            ),
            edges_E=edges_E,
            places_L=places_L,
            prefix_P=torch.zeros(0, dtype=torch.long),
            routes=layout.routes and layout.routes.at(places_L),
        )


def parents(nodes: Sequence[Node]) -> Tensor:
    """[L] layout index of each token's predecessor; -1 at a root."""
    parents_L = torch.arange(nodes[-1].end) - 1
    parents_L[[node.start for node in nodes]] = torch.tensor([node.parent for node in nodes])
    return parents_L


def path_to(layout: TreeLayout, place: int) -> Tensor:
    """Layout indices of the ancestors of a token, root first."""
    return _indices(ancestors(layout.nodes, place))


def _path_nodes(
    nodes: Sequence[Node], path: Sequence[Span], span: Span, prefix: int
) -> Iterator[Node]:
    """The path as the first nodes of the part's layout; subtrees end within the range."""
    depth = 0
    for begin, stop in path:
        subtree_end = min(holder(nodes, begin).subtree_end, span[1]) - span[0] + prefix
        yield Node(depth, depth + stop - begin, subtree_end, depth, depth - 1)
        depth += stop - begin


def _own_nodes(nodes: Sequence[Node], span: Span, prefix: int) -> Iterator[Node]:
    """The nodes of a range, cut at its ends, in the part's layout after the path."""
    start, end = span
    shift = prefix - start
    for index in range(bisect_right(nodes, (start, nodes[-1].end + 1)) - 1, len(nodes)):
        node = nodes[index]
        if node.start >= end:
            return
        begun = max(start - node.start, 0)
        depth = node.depth + begun
        # A parent before the range is on the path, where index and depth are the same.
        inside = not begun and node.parent >= start
        yield Node(
            node.start + begun + shift,
            min(node.end, end) + shift,
            min(node.subtree_end, end) + shift,
            depth,
            node.parent + shift if inside else depth - 1,
        )


def _indices(spans: Sequence[Span]) -> Tensor:
    if not spans:
        return torch.zeros(0, dtype=torch.long)
    return torch.cat([torch.arange(*span) for span in spans])
