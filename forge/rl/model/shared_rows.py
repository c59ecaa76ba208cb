"""The head over ranks that compute the same tokens: each computes a share of the logit rows.

Every rank has the states of all tokens and the whole head, and gets the columns of all edges. The
gradient of the states is summed over ranks, that of head and norm by their sharding.

Shapes: R logit rows, E edges, e those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from forge.rl.model.backbone import BackboneOutput
from forge.rl.parallel.context_parallel import gather_edges
from forge.rl.parallel.tensor_exchange import entered, share
from forge.rl.tree.parts import HeadRows

Columns = Callable[[BackboneOutput, HeadRows], tuple[Tensor, Tensor]]


def shared_columns(
    columns: Columns, backbone: BackboneOutput, head: HeadRows, parts: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """`columns(backbone, head)`, columns and entropies [E], over the ranks of `parts`; None: by
    this rank alone."""
    if parts is None:
        return columns(backbone, head)
    rows = share(len(head.places_R), parts)
    own, edges = head.cut(rows.start, rows.stop)
    states_LC = entered(backbone.states_LC, parts)
    columns_e, entropy_e = columns(replace(backbone, states_LC=states_LC), own)
    count = len(head.rows_E)
    return (
        gather_edges(columns_e, edges, count, parts),
        gather_edges(entropy_e, edges, count, parts),
    )
