"""Sums over the ranks of a group, none of which is left waiting for one that ran out of memory.

Owns every exchange between ranks that compute the same trees. Ahead of each, all say whether they
got there; one whose memory did not suffice says so instead of taking part, wherever the others are
by then, and all of them leave the attempt at that point. What is tried next is
`forge.rl.learner.learner`'s. One that fails in another way is gone for the others, who can tell
that from failures of their own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class RankShortage(MemoryError):
    """Memory did not suffice on another rank of the group."""


class RankLost(RuntimeError):
    """Another rank of the group does not answer: a consequence, of which it alone knows the
    cause."""


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Over all ranks, in place. Raises `RankShortage` when one of them is not going to come, and
    `RankLost` when one is gone."""
    meet(group, tensor.device)
    _reduce(tensor, op, group)


def meet(group: dist.ProcessGroup, device: torch.device, *, shortage: bool = False) -> None:
    """All ranks come here before they go on together; with `shortage` this one does not go on.

    Raises `RankShortage` on the ranks without a shortage when there is one that has, and
    `RankLost` when one is gone.
    """
    rank = dist.get_rank(group)
    short = torch.tensor([rank + 1 if shortage else 0], dtype=torch.int32, device=device)
    _reduce(short, dist.ReduceOp.MAX, group)
    if int(short) and not shortage:
        raise RankShortage(f"out of memory on rank {int(short) - 1} of the group")


def _reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    try:
        dist.all_reduce(tensor, op=op, group=group)
    except RuntimeError as error:
        raise RankLost(f"a rank of the group is gone: {error}") from error
