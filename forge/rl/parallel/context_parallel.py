"""One tree over several ranks (context parallelism): each computes a range of the layout, exactly.

Owns the exchange between ranks of a group with the same weights and the same batch. Ranges follow
the depth-first order; `forge.rl.parallel.partition` chooses them. A rank's queries attend the path
to its first token on other ranks: these keys and values are gathered layer by layer, attended in
slabs, and merged with the rank's own by log-sum-exp. Keys are exchanged instead of queries, because
they are few: one path per rank, shared by its whole range. In the backward, gradients of gathered
keys are summed over ranks and returned to their owners.

Log-probs are gathered too: every rank has those of the whole tree and computes the same loss for
any objective. Each rank differentiates its own part; parameter gradients are summed at the end.

Shapes: N tokens that are attended by other ranks, E distinct edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.core.prefix_tree import Span
from forge.rl.collectives import all_reduce
from forge.rl.parallel.handed_states import HandedStates
from forge.rl.tree.kv_relay import Slots, shared_slots, shared_tokens
from forge.rl.tree.parts import TreeLayout, TreePart, cut_part, idle_part, path_to

BUCKET_BYTES = 16 << 20
"""Small gradients are summed together, up to this size: an exchange costs more than their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The part of a tree that one rank computes."""

    part: TreePart
    slots: Slots
    size: int
    """N."""
    edges: int
    """E."""


def rank_part(layout: TreeLayout, spans: Sequence[Span], *, rank: int) -> RankPart:
    """The part of a rank; `spans` are the ranges of all ranks."""
    nothing = torch.zeros(0, dtype=torch.long)
    paths = [path_to(layout, start) if start < end else nothing for start, end in spans]
    start, end = spans[rank]
    return RankPart(
        part=cut_part(layout, (start, end)) if start < end else idle_part(layout),
        slots=shared_slots(spans, paths)[rank],
        size=len(shared_tokens(paths)),
        edges=len(layout.head.rows_E),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPrefix:
    """One rank's prefix, gathered from the ranks that compute it."""

    group: dist.ProcessGroup
    slots: Slots
    size: int
    states: HandedStates | None = None
    """States of recurrent layers, if the model has some."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with the prefix before them, in the type of the values, as attention
        takes them. All ranks call it in layer order."""
        key = key.to(value.dtype)
        if not self.size:
            return key, value
        keys, values = _Exchanged.apply(key, value, self)  # type: ignore[no-untyped-call]
        return keys, values


class _Exchanged(torch.autograd.Function):
    """Each of the N tokens has one owner, so a sum over ranks is a gather."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, prefix: GatheredPrefix) -> tuple[Tensor, ...]:
        ctx.prefix, slots = prefix, prefix.slots.to(key.device)
        # One exchange for both; the heads of values may have another size.
        own = torch.cat([key, value], dim=3)
        shared = own.new_zeros((*own.shape[:2], prefix.size, own.shape[3]))
        shared[:, :, slots.own_slots] = own[:, :, slots.own]
        all_reduce(shared, prefix.group)
        whole = torch.cat([shared[:, :, slots.prefix_slots], own], dim=2)
        keys, values = torch.split(whole, [key.shape[3], value.shape[3]], dim=3)
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        prefix: GatheredPrefix = ctx.prefix
        slots, count = prefix.slots.to(grads[0].device), len(prefix.slots.prefix_slots)
        whole = torch.cat(grads, dim=3)
        wide = torch.promote_types(whole.dtype, torch.float32)
        owed = whole.new_zeros((*whole.shape[:2], prefix.size, whole.shape[3]), dtype=wide)
        owed[:, :, slots.prefix_slots] = whole[:, :, :count].to(wide)
        all_reduce(owed, prefix.group)
        own = whole[:, :, count:].clone()
        own[:, :, slots.own] += owed[:, :, slots.own_slots].to(own.dtype)
        key, value = torch.split(own, [one.shape[3] for one in grads], dim=3)
        return key, value, None


def gather_edges(
    values_e: Tensor, edges_e: Tensor | slice, count: int, group: dist.ProcessGroup
) -> Tensor:
    """[E] of `count` edges, gathered from all ranks, each with the edges `edges_e`; each rank
    differentiates its own part.

    Correct only if every rank computes the same loss from the result.
    """
    out: Tensor = _Edges.apply(values_e, edges_e, count, group)  # type: ignore[no-untyped-call]
    return out


class _Edges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values_e: Tensor, edges_e: Tensor | slice, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.edges = edges_e.to(values_e.device) if isinstance(edges_e, Tensor) else edges_e
        all_E = values_e.new_zeros((count, *values_e.shape[1:]))
        all_E[ctx.edges] = values_e
        all_reduce(all_E, group)
        return all_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_E: Tensor) -> tuple[Tensor | None, ...]:
        return grad_E[ctx.edges], None, None, None


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients over ranks. A parameter without a gradient on every rank stays without."""
    trained = [one for one in parameters if one.requires_grad]
    if not trained:
        return
    present = torch.tensor([one.grad is not None for one in trained], dtype=torch.int32)
    present = present.to(trained[0].device)
    all_reduce(present, group, op=dist.ReduceOp.MAX)
    gradients = []
    for parameter, somewhere in zip(trained, present.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        _sum_bucket(bucket, group)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one type, up to `BUCKET_BYTES` together."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        size += gradient.nbytes
        if bucket and (size > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], gradient.nbytes
        bucket.append(gradient)
    if bucket:
        yield bucket


def _sum_bucket(bucket: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if len(bucket) == 1:
        all_reduce(bucket[0], group)
        return
    total = torch.cat([one.flatten() for one in bucket])
    all_reduce(total, group)
    start = 0
    for one in bucket:
        one.copy_(total[start : start + one.numel()].view_as(one))
        start += one.numel()
