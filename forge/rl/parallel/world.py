"""The ranks of a training group, as a mesh: copies, shards, ranges of a tree, parts of a layer.

Owns the shape of the mesh and its process groups. A world of one has no mesh and no groups; all
code that follows is the same for it. `forge.rl.parallel.sharding` shards parameters over the mesh,
`forge.rl.parallel.rounds` divides the trees of a batch over its data groups, and
`forge.rl.parallel.context_parallel` divides a tree over the ranks of one data group.

    rank = ((copy * dp_shard + shard) * cp + range) * tp + part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from forge.core.errors import InvalidArgument
from forge.rl.collectives import all_reduce, lost_ranks
from forge.rl.config import MeshShape

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeshes:
    """The meshes over which parameters are sharded."""

    layers: DeviceMesh
    """Mesh of `fully_shard` for layers: (shards), or (copies, shards)."""
    outside: DeviceMesh
    """The same for the parameters outside of layers; parts of a layer are shards here, too."""
    parts: DeviceMesh | None = None
    """The ranks that divide each layer beforehand; None without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's place among all ranks, and its groups."""

    shape: MeshShape = field(default_factory=MeshShape)
    everyone: dist.ProcessGroup | None = None
    """All ranks; None in a world of one."""
    tree: dist.ProcessGroup | None = None
    """The ranks that compute the other ranges of this rank's trees; None if it computes them
    alone."""
    data: dist.ProcessGroup | None = None
    """One rank of each data group; None if there is one group."""
    parts: dist.ProcessGroup | None = None
    """The ranks that compute this rank's tokens, each a part of every layer; None if it computes
    whole layers."""
    peers: dist.ProcessGroup | None = None
    """All ranks with this rank's part of a layer: together they have each token once."""
    meshes: ShardMeshes | None = None
    """None if every rank has all parameters."""

    @property
    def rank(self) -> int:
        """This rank in the world."""
        return dist.get_rank(self.everyone) if self.everyone is not None else 0

    @property
    def data_group(self) -> int:
        """Number of this rank's data group."""
        return self.rank // self.shape.group_ranks

    def summed(self, value: float, device: torch.device) -> float:
        """The sum over data groups. Raises like `forge.rl.collectives.all_reduce`."""
        return _sum(value, self.data, device)

    def total(self, value: float, device: torch.device) -> float:
        """The sum over all ranks. Raises like `forge.rl.collectives.all_reduce`."""
        return _sum(value, self.everyone, device)

    def over_tokens(self, value: float, device: torch.device) -> float:
        """The sum over the ranks that have different tokens. Raises like `total`."""
        return _sum(value, self.everyone if self.parts is None else self.peers, device)

    def gathered(self, values: Sequence[T]) -> list[T]:
        """The values of all data groups on rank 0, in the order of the groups; elsewhere those of
        the rank itself. Tensors must be in host memory."""
        if self.data is None:
            return list(values)
        first = dist.get_rank(self.data) == 0
        lists: list[Any] | None = [None] * dist.get_world_size(self.data) if first else None
        dist.gather_object(list(values), lists, group_dst=0, group=self.data)
        return [one for each in lists for one in each] if lists is not None else list(values)

    def exchanged(self, value: T) -> list[T]:
        """The values of all data groups, in the order of the groups, on every rank. Raises like
        `forge.rl.collectives.all_reduce`."""
        if self.data is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.data)
        with lost_ranks():
            dist.all_gather_object(values, value, group=self.data)
        return values


def make_world(shape: MeshShape, device: torch.device) -> World:
    """The world of an initialized default process group; all ranks call it.

    Raises `InvalidArgument` when the mesh has another number of ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if shape.ranks != ranks:
        raise InvalidArgument(
            f"dp_replicate = {shape.dp_replicate}, dp_shard = {shape.dp_shard}, cp = {shape.cp}, "
            f"tp = {shape.tp} is a mesh of {shape.ranks} ranks, and there are {ranks}"
        )
    if not dist.is_initialized():
        return World(shape=shape)
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    sizes = (shape.dp_replicate, shape.dp_shard, shape.cp, shape.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return World(
        shape=shape,
        everyone=dist.group.WORLD,
        tree=mesh.get_group("cp") if shape.cp > 1 else None,
        data=mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group()
        if shape.data_groups > 1
        else None,
        parts=mesh.get_group("tp") if shape.tp > 1 else None,
        peers=mesh["dp_replicate", "dp_shard", "cp"]._flatten("peers").get_group()
        if shape.tp > 1
        else None,
        meshes=_shard_meshes(mesh, shape),
    )


def _sum(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    if group is None:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    all_reduce(total, group)
    return float(total)


def _shard_meshes(mesh: DeviceMesh, shape: MeshShape) -> ShardMeshes | None:
    if not shape.sharded:
        return None
    device = mesh.device_type
    if shape.tp == 1:
        shards = _mesh(device, copies=shape.dp_replicate, shards=shape.shards)
        return ShardMeshes(layers=shards, outside=shards)
    divided = _mesh(
        device, copies=shape.dp_replicate, shards=shape.dp_shard * shape.cp, parts=shape.tp
    )
    # Also for sums over both dimensions, such as that of a gradient norm.
    all_shards = divided["shards", "parts"]._flatten("all_shards")
    if shape.dp_replicate == 1:
        return ShardMeshes(layers=divided["shards"], outside=all_shards, parts=divided["parts"])
    return ShardMeshes(
        layers=divided["copies", "shards"],
        outside=_mesh(device, copies=shape.dp_replicate, shards=shape.shards),
        parts=divided["parts"],
    )


def _mesh(device: str, *, copies: int, **sizes: int) -> DeviceMesh:
    """A mesh of all ranks with named dimensions; copies are one only if there are several."""
    named = {"copies": copies, **sizes} if copies > 1 else sizes
    return init_device_mesh(device, tuple(named.values()), mesh_dim_names=tuple(named))


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; all ranks of its mesh call it. Plain tensors are returned."""
    if not isinstance(tensor, DTensor):
        return tensor
    # One dimension after the other: torch warns when it has to choose the order.
    placements = list(tensor.placements)
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
