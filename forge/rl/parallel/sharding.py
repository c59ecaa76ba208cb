"""A model whose parameters are divided over ranks (FSDP2, `torch.distributed.fsdp.fully_shard`).

Owns the units of sharding, the dimension that divides a parameter, and the entry through which
every computation with the model's parameters runs. A layer is one unit: it is gathered for its
forward and again for its backward.
Embedding, last norm and head are the unit of the entry, gathered once per pass, since tied weights
must be in one unit. Gradients are summed, not averaged: the loss of a pass is already its part of
the loss of the whole batch.

With parts (`forge.rl.parallel.tensor_parallel`) layers are divided by transformers' plan first, and
sharded over the ranks of one part. The unit of the entry is sharded over all ranks: each has the
gradient of its share of tokens and logit rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from forge.core.errors import InvalidArgument
from forge.rl.numerics import wide_modules
from forge.rl.parallel.tensor_parallel import Division
from forge.rl.parallel.world import World, whole

log = logging.getLogger(__name__)
T = TypeVar("T")
MOST_PADDING = 1.1
"""Rows of a parameter with padding, relative to those without, above which another dimension is
divided. FSDP pads the first dimension alone; with more ranks than experts some would have none."""
NEEDED = ("reset_iter_state", "set_reduce_scatter_unused_params")
"""Methods of FSDPModule that torch 2.11 lacks."""
_UNCAST = MixedPrecisionPolicy(cast_forward_inputs=False)


class Entry(nn.Module):
    """Runs computations with the parameters of a model; if they are sharded, with its own unit
    gathered. All ranks run the same computations in the same order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        """`compute()`, whose tensors are in tuples."""
        return compute()

    def run(self, compute: Callable[[], T]) -> T:
        """`compute()` with the unit gathered; it stays so until the backward, if there is one."""
        result: T = self(compute)
        if not torch.is_grad_enabled() and isinstance(self, FSDPModule):
            self.reset_iter_state()
        return result

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context with embedding, norm and head gathered, outside of a pass."""
        if not isinstance(self, FSDPModule):
            yield
            return
        self.unshard()
        try:
            yield
        finally:
            self.reshard()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model."""
    return [*named_layers(model).values()]


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a transformers model by name."""
    named = model.named_modules()
    return {name: one for name, one in named if isinstance(one, GradientCheckpointingLayer)}


def shard(entry: Entry, world: World, *, narrow: torch.dtype | None = None) -> None:
    """Divide the parameters of a model over the ranks of the world, in place.

    `narrow` is the type in which layers are gathered, None: that of their parameters; routers,
    embedding, last norm and head keep theirs. Gradients are summed in the parameters' own type.
    Every rank must have the same parameters. Raises `InvalidArgument` for a model without layers
    that transformers marks, one that parts cannot divide, and with a torch that lacks `NEEDED`.
    """
    assert world.meshes is not None, "a mesh that shards"
    meshes, shape = world.meshes, world.shape
    setting = f"tp = {shape.tp}" if shape.tp > 1 else f"dp_shard = {shape.dp_shard}"
    if not all(hasattr(FSDPModule, name) for name in NEEDED):
        raise InvalidArgument(
            f"{setting} is not allowed with torch {torch.__version__}: "
            f"it has no FSDPModule.{' and no '.join(NEEDED)}, as torch 2.13 has"
        )
    layers = layers_of(entry.model)
    if not layers:
        raise InvalidArgument(
            f"{setting} is not allowed: {type(entry.model).__name__} has "
            "no layers that can be gathered one by one"
        )
    if meshes.parts is not None:
        divide(entry.model, meshes.parts)
    if narrow is None:
        _shard_layers(layers, meshes.layers, _UNCAST)
    else:
        head = entry.model.get_output_embeddings()  # type: ignore[operator]
        routers = [one for one in wide_modules(entry.model) if one is not head]
        _shard_layers(routers, meshes.layers, _UNCAST)
        wide = next(layers[0].parameters()).dtype
        of_layers = MixedPrecisionPolicy(narrow, wide, cast_forward_inputs=False)
        _shard_layers(layers, meshes.layers, of_layers)
    fully_shard(
        entry,
        mesh=meshes.outside,
        mp_policy=_UNCAST,
        shard_placement_fn=partial(_place, shards=meshes.outside.size(-1)),
        reshard_after_forward=False,
    )
    for module in entry.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # A rank whose trees use no token of an expert still takes part in its sum.
            module.set_reduce_scatter_unused_params(True, recurse=False)


def _shard_layers(
    modules: Iterable[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    """Divide modules that are gathered for their forward alone."""
    place = partial(_place, shards=mesh.size(-1))
    for module in modules:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=place,
            reshard_after_forward=True,
        )


def _place(parameter: nn.Parameter, *, shards: int) -> Shard:
    """The dimension that shards divide: the first, or, if that needs much padding, one that is a
    multiple of them and that parts do not divide."""
    sizes = local(parameter.detach()).shape
    padded = math.ceil(sizes[0] / shards) * shards if sizes else 0
    if not sizes or padded <= MOST_PADDING * sizes[0]:
        return Shard(0)
    parts = parameter.placements if isinstance(parameter, DTensor) else ()
    taken = {one.dim for one in parts if isinstance(one, Shard)}
    free = (dim for dim, size in enumerate(sizes) if size % shards == 0 and dim not in taken)
    return Shard(next(free, 0))


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divide the layers of a model over the parts of a mesh; logs what stays whole. Raises
    `InvalidArgument` for a model that cannot be divided."""
    division = Division(model, named_layers(model), mesh.size())
    if division.whole_experts:
        log.warning(
            "mesh.tp = %d does not divide the experts of %s; every part computes all of them: %s",
            mesh.size(),
            type(model).__name__,
            division.whole_experts,
        )
    division.apply(mesh)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_sharded(values: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `values`, divided like another tensor; no communication. Divided ones
    are returned."""
    if not isinstance(like, DTensor) or isinstance(values, DTensor):
        return values
    values = values.to(like.device)
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], largest: float) -> float:
    """Scale gradients down to the norm `largest`; returns the norm before. Norms of gradients that
    are whole, and of those sharded over different meshes, are combined."""
    trained = [one for one in parameters if one.grad is not None]
    parts = _alike(trained)
    if len(parts) == 1 and not isinstance(trained[0].grad, DTensor):
        return float(torch.nn.utils.clip_grad_norm_(trained, largest))
    norms = [torch.nn.utils.get_total_norm([_grad(one) for one in part]) for part in parts]
    norm = math.hypot(*(float(whole(one)) for one in norms))
    for part in parts:
        torch.nn.utils.clip_grads_with_norm_(part, largest, torch.tensor(norm))
    return norm


def _alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters by the division of their gradients; kernels for several tensors take one kind."""
    found: dict[Any, list[Tensor]] = {}
    for one in parameters:
        grad = _grad(one)
        kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        found.setdefault(kind, []).append(one)
    return [*found.values()]


def _grad(parameter: Tensor) -> Any:
    return parameter.grad
