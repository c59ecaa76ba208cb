"""Splits a merged tree into its distinct samples, each a separate sequence.

For models whose states depend on more than the tokens before, for example on the length of the
sequence: a sample that is a prefix of another must then be computed separately.

Shapes: L layout tokens of the merged tree, M of the split one, T trained tokens, S samples, R logit
rows, E edges.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from forge.core.prefix_tree import Node
from forge.rl.tree.batch import TreeBatch
from forge.rl.tree.parts import HeadRows, TreeLayout, cut_part, path_to


def separated(batch: TreeBatch) -> TreeBatch:
    """The same samples and columns, over a layout without shared prefixes.

    Samples with the same tokens stay one sequence. Idempotent.
    """
    if batch.separate:
        return batch
    merged = batch.layout
    lasts, sequences_S = torch.unique(batch.lasts_S, return_inverse=True)
    places = [torch.cat([path_to(merged, int(last)), last[None]]) for last in lasts]
    starts = torch.tensor([0, *(len(one) for one in places)]).cumsum(0)
    spans = list(pairwise(starts.tolist()))
    places_M = torch.cat([*places, torch.zeros(0, dtype=torch.long)])
    counts = torch.bincount(sequences_S, minlength=len(lasts)).to(merged.weights_L.dtype)
    head, edges_T = _head(batch, starts, sequences_S)
    layout = TreeLayout(
        nodes=tuple(Node(start, end, end, 0, -1) for start, end in spans),
        ids_L=merged.ids_L[places_M],
        positions_L=merged.positions_L[places_M],
        weights_L=counts.repeat_interleave(starts.diff()),
        head=head,
        channels=merged.channels,
        routes=merged.routes and merged.routes.at(places_M),
    )
    return replace(
        batch,
        layout=layout,
        parts=tuple(cut_part(layout, span) for span in spans),
        edges_T=edges_T.to(batch.edges_T.device),
        lasts_S=starts[1:][sequences_S] - 1,
        separate=True,
    )


def _head(
    batch: TreeBatch, starts: torch.Tensor, sequences_S: torch.Tensor
) -> tuple[HeadRows, torch.Tensor]:
    """Rows and edges per sequence, and the edge of each trained token."""
    head, positions_L = batch.layout.head, batch.layout.positions_L
    edges, rows = max(1, len(head.rows_E)), max(1, len(head.places_R))
    sequences_T = sequences_S.repeat_interleave(batch.lengths_S.cpu())
    keys, edges_T = torch.unique(
        sequences_T * edges + batch.edges_T.cpu(), return_inverse=True
    )  # ascending: edges of a tree are in the order of their rows
    old_E, sequences_E = keys % edges, keys // edges
    row_keys, rows_E = torch.unique_consecutive(
        sequences_E * rows + head.rows_E[old_E], return_inverse=True
    )
    old_R, sequences_R = row_keys % rows, row_keys // rows
    return HeadRows(
        places_R=starts[sequences_R] + positions_L[head.places_R[old_R]],
        temperatures_R=head.temperatures_R[old_R],
        rows_E=rows_E,
        targets_E=head.targets_E[old_E],
    ), edges_T
