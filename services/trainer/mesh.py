"""Settings of the ranks' mesh."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated

from msgspec import Meta

from forge.core.errors import InvalidArgument
from forge.rl.config import MeshShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """Division of model and batch among ranks."""

    dp_replicate: Annotated[int, Meta(ge=0)] = 1
    """Copies of the model; each computes other trees of a batch. 0: as many as the other dimensions
    leave ranks for."""
    dp_shard: Annotated[int, Meta(ge=0)] = 1
    """Data groups of a copy, which divide its parameters, gradients and optimizer state; each
    computes other trees. 1: every rank holds all of them; 0: as many as the other dimensions leave
    ranks for."""
    cp: Annotated[int, Meta(ge=0)] = 0
    """Ranks that compute one tree, each a range of its tokens (context parallelism); 0: all that
    the other dimensions leave, or 1 if another dimension is 0."""
    tp: Annotated[int, Meta(ge=1)] = 1
    """Ranks that divide each layer by heads, inner channels and experts, and compute every token
    together. Neighbors: keep them on one host. 1: each computes whole layers."""
    join_s: Annotated[float, Meta(gt=0)] = 300.0
    """Longest time until all ranks have joined; then the start fails, and the supervisor repeats
    it."""

    def shape(self, ranks: int) -> MeshShape:
        """The mesh of that many ranks. Raises `InvalidArgument` when they do not make one."""
        sizes = {
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }
        # The dimension that changes with the number of ranks; `cp` has 0 as its default.
        free = next((name for name, size in sizes.items() if not size), None)
        if self.dp_replicate == 0 and self.dp_shard == 0:
            raise InvalidArgument(
                "mesh.dp_replicate = 0 is not allowed with mesh.dp_shard = 0: one dimension alone "
                "has the ranks that the others leave"
            )
        if free is not None:
            fixed = {name: size or 1 for name, size in sizes.items() if name != free}
            sizes = {**fixed, free: max(1, ranks // prod(fixed.values()))}
        shape = MeshShape(**sizes)
        if shape.ranks != ranks:
            raise InvalidArgument(
                f"mesh.dp_replicate = {self.dp_replicate}, mesh.dp_shard = {self.dp_shard}, "
                f"mesh.cp = {self.cp}, mesh.tp = {self.tp} is not allowed with {ranks} ranks: "
                f"the mesh has {shape.ranks}"
            )
        return shape


def check_reading(read_from: str, rank_token_file: str, shape: MeshShape) -> None:
    """Raises `InvalidArgument` for ranks that cannot read, and a token that no rank uses."""
    if read_from == "ranks" and not shape.sharded:
        raise InvalidArgument(
            "read_from = ranks is not allowed with mesh.dp_shard = 1 and mesh.tp = 1: ranks with "
            "whole weights retry a batch in smaller trees after a shortage of memory, and need all "
            "samples; set read_from = rank_0, or divide the weights"
        )
    if read_from == "ranks" and shape.data_groups == 1:
        raise InvalidArgument(
            "read_from = ranks is not allowed with mesh.dp_shard = 1 and mesh.dp_replicate = 1: "
            "all ranks compute the same trees; set read_from = rank_0"
        )
    if rank_token_file and read_from != "ranks":
        raise InvalidArgument(
            f"rank_token_file = {rank_token_file!r} is not allowed with read_from = {read_from}: "
            "no rank above 0 reads trajectories"
        )
