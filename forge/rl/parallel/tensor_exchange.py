"""Exchanges of the ranks that divide the products of a layer (tensor parallelism), differentiable.

All ranks of a group have the same tokens and the same loss. A value is one of two kinds, and so is
its gradient:

    whole     equal on all ranks
    own       each rank's columns, rows, experts or logit rows

Each exchange turns one kind into the other in the forward, and its gradient back in the backward.
An exchange does not announce a shortage of memory: ranks that divide parameters do not retry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.rl.collectives import lost_ranks

Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]


def entered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same value, at the entry of an own computation: its gradients are summed over ranks."""
    return _exchanged(whole, group, forth=_same, back=lambda grad, of: _sum(grad.clone(), of))


def summed(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, whole; takes the memory of `own`."""
    return _exchanged(own, group, forth=_sum, back=_same)


def joined(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The columns of all ranks, whole; each rank has equally many."""
    return _exchanged(own, group, forth=_gather, back=_columns)


def own_columns(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's columns of a whole value."""
    return _exchanged(whole, group, forth=_columns, back=_gather)


def own_gradient(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same value [..., L, C], with the gradient of this rank's share of the L tokens: a sum
    over ranks then counts each token once."""
    return _exchanged(whole, group, forth=_same, back=_of_own_tokens)


def share(count: int, group: dist.ProcessGroup) -> slice:
    """This rank's range of `count` items."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def _same(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    tensor = tensor.contiguous()
    with lost_ranks():
        dist.all_reduce(tensor, group=group)
    return tensor


def _columns(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor[..., share(tensor.shape[-1], group)].contiguous()


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with lost_ranks():
        dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _of_own_tokens(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    own, kept = torch.zeros_like(grad), share(grad.shape[-2], group)
    own[..., kept, :] = grad[..., kept, :]
    return own


def _exchanged(
    value: Tensor, group: dist.ProcessGroup, *, forth: Exchange, back: Exchange
) -> Tensor:
    out: Tensor = _Exchange.apply(value, group, forth, back)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, group: dist.ProcessGroup, forth: Exchange, back: Exchange
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        out = forth(value, group)
        if out is value:
            ctx.mark_dirty(value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.group), None, None, None
