"""Sums over the ranks of a group, safe when one rank runs out of memory.

Owns every exchange between ranks that compute the same trees. Before each exchange all ranks
report whether they reached it. A rank without memory reports that instead, and all ranks abandon
the attempt at this point; `forge.rl.learner.learner` retries. A rank that fails in another way
closes its connection: the others raise `RankLost`, which differs from their own failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

K = TypeVar("K")


class RankShortage(MemoryError):
    """Another rank of the group ran out of memory."""

    def __init__(self, message: str, group: dist.ProcessGroup) -> None:
        super().__init__(message)
        self.group = group
        """The group in which that rank reported it."""


class RankLost(RuntimeError):
    """Another rank of the group does not respond; that rank reports the cause."""


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce over all ranks, in place. Raises `RankShortage` when a rank ran out of memory, and
    `RankLost` when one does not respond."""
    meet(group, tensor.device)
    _reduce(tensor, op, group)


def broadcast_tensors(
    tensors: Mapping[K, Tensor], group: dist.ProcessGroup, *, source: int, device: torch.device
) -> dict[K, Tensor]:
    """The tensors of rank `source` of the group, on all of its ranks; those of the others do not
    count. Shapes and types may be unknown there. Raises like `all_reduce`."""
    outline: list[Any] = [[(key, one.shape, one.dtype) for key, one in tensors.items()]]
    meet(group, device)
    with lost_ranks():
        dist.broadcast_object_list(outline, group=group, group_src=source)
    sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in outline[0]]
    if dist.get_rank(group) == source:
        data = torch.cat([_bytes(one) for one in tensors.values()])
    else:
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    meet(group, device)  # a rank without memory for it is heard here
    with lost_ranks():
        dist.broadcast(data, group=group, group_src=source)
    # Each part a tensor of its own: a view of another type needs an aligned beginning.
    parts = [part.clone() for part in torch.split(data, sizes)]
    return {
        key: part.view(dtype).reshape(shape)
        for part, (key, shape, dtype) in zip(parts, outline[0], strict=True)
    }


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def meet(group: dist.ProcessGroup, device: torch.device, *, shortage: bool = False) -> None:
    """Barrier before an exchange; `shortage` reports that this rank ran out of memory.

    Raises `RankShortage` on the other ranks when a rank reports a shortage, and `RankLost` when
    one does not respond.
    """
    rank = dist.get_rank(group)
    short = torch.tensor([rank + 1 if shortage else 0], dtype=torch.int32, device=device)
    _reduce(short, dist.ReduceOp.MAX, group)
    if int(short) and not shortage:
        raise RankShortage(f"out of memory on rank {int(short) - 1} of the group", group)


def _reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    with lost_ranks():
        dist.all_reduce(tensor, op=op, group=group)


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Context of an exchange. Raises `RankLost` when a rank does not respond."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"a rank of the group does not respond: {error}") from error
