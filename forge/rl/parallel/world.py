"""The ranks of a training group, as a mesh: copies, shards of the parameters, ranges of a tree.

Owns the shape of the mesh and its process groups. A world of one has no mesh and no groups; all
code that follows is the same for it. `forge.rl.parallel.sharding` shards parameters over the mesh,
`forge.rl.parallel.rounds` divides the trees of a batch over its data groups, and
`forge.rl.parallel.context_parallel` divides a tree over the ranks of one data group.

    rank = (copy * dp_shard + shard) * cp + range
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge.core.errors import InvalidArgument
from forge.rl.collectives import all_reduce
from forge.rl.config import MeshShape

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's place among all ranks, and its groups."""

    shape: MeshShape = field(default_factory=MeshShape)
    everyone: dist.ProcessGroup | None = None
    """All ranks; None in a world of one."""
    tree: dist.ProcessGroup | None = None
    """The ranks that compute this rank's trees; None if it computes them alone."""
    data: dist.ProcessGroup | None = None
    """One rank of each data group; None if there is one group."""
    mesh: DeviceMesh | None = None
    """Mesh of `fully_shard`: (shards), or (copies, shards)."""

    @property
    def rank(self) -> int:
        """This rank in the world."""
        return dist.get_rank(self.everyone) if self.everyone is not None else 0

    @property
    def data_group(self) -> int:
        """Number of this rank's data group."""
        return self.rank // self.shape.cp

    def summed(self, value: float, device: torch.device) -> float:
        """The sum over data groups. Raises like `forge.rl.collectives.all_reduce`."""
        return _sum(value, self.data, device)

    def total(self, value: float, device: torch.device) -> float:
        """The sum over all ranks. Raises like `forge.rl.collectives.all_reduce`."""
        return _sum(value, self.everyone, device)

    def gathered(self, values: Sequence[T]) -> list[T]:
        """The values of all data groups on rank 0, in the order of the groups; elsewhere those of
        the rank itself. Tensors must be in host memory."""
        if self.data is None:
            return list(values)
        first = dist.get_rank(self.data) == 0
        lists: list[Any] | None = [None] * dist.get_world_size(self.data) if first else None
        dist.gather_object(list(values), lists, group_dst=0, group=self.data)
        return [one for each in lists for one in each] if lists is not None else list(values)


def make_world(shape: MeshShape, device: torch.device) -> World:
    """The world of an initialized default process group; all ranks call it.

    Raises `InvalidArgument` when the mesh has another number of ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if shape.ranks != ranks:
        raise InvalidArgument(
            f"dp_replicate = {shape.dp_replicate}, dp_shard = {shape.dp_shard}, cp = {shape.cp} "
            f"is a mesh of {shape.ranks} ranks, and there are {ranks}"
        )
    if not dist.is_initialized():
        return World(shape=shape)
    names = ("dp_replicate", "dp_shard", "cp")
    sizes = (shape.dp_replicate, shape.dp_shard, shape.cp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return World(
        shape=shape,
        everyone=dist.group.WORLD,
        tree=mesh.get_group("cp") if shape.cp > 1 else None,
        data=mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group()
        if shape.data_groups > 1
        else None,
        mesh=_shard_mesh(mesh, shape),
    )


def _sum(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    if group is None:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    all_reduce(total, group)
    return float(total)


def _shard_mesh(mesh: DeviceMesh, shape: MeshShape) -> DeviceMesh | None:
    if not shape.sharded:
        return None
    shards = mesh["dp_shard", "cp"]._flatten("shards")
    if shape.dp_replicate == 1:
        return shards
    return init_device_mesh(
        mesh.device_type,
        (shape.dp_replicate, shape.shards),
        mesh_dim_names=("copies", "shards"),
    )


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; all ranks of its mesh call it. Plain tensors are returned."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()
