"""Exchanges of the ranks that divide the products of a layer (tensor parallelism), differentiable.

All ranks of a group have the same tokens and the same loss. A value is one of two kinds, and so is
its gradient:

    whole     equal on all ranks
    own       each rank's columns, rows, experts or logit rows

Each exchange turns one kind into the other in the forward, and its gradient back in the backward.
An exchange does not announce a shortage of memory: ranks that divide parameters do not retry.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.rl.collectives import lost_ranks


def entered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same value, at the entry of an own computation: its gradients are summed over ranks."""
    out: Tensor = _Entered.apply(whole, group)  # type: ignore[no-untyped-call]
    return out


def summed(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, whole; takes the memory of `own`."""
    out: Tensor = _Summed.apply(own, group)  # type: ignore[no-untyped-call]
    return out


def joined(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The columns of all ranks, whole; each rank has equally many."""
    out: Tensor = _Joined.apply(own, group)  # type: ignore[no-untyped-call]
    return out


def own_columns(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's columns of a whole value."""
    out: Tensor = _OwnColumns.apply(whole, group)  # type: ignore[no-untyped-call]
    return out


def own_gradient(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same value [..., L, C], with the gradient of this rank's share of the L tokens: a sum
    over ranks then counts each token once."""
    out: Tensor = _OwnGradient.apply(whole, group)  # type: ignore[no-untyped-call]
    return out


def share(count: int, group: dist.ProcessGroup) -> slice:
    """This rank's range of `count` items."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


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


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad.clone(), ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = _sum(own, group)
        if total is own:
            ctx.mark_dirty(own)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(own, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _columns(grad, ctx.group), None


class _OwnColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _columns(whole, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, ctx.group), None


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, kept = torch.zeros_like(grad), share(grad.shape[-2], ctx.group)
        own[..., kept, :] = grad[..., kept, :]
        return own, None
