"""Runs cases on meshes of ranks, as programs of torchrun and as forks.

A mesh has the name "<dp_replicate>x<dp_shard>x<cp>", with "x<tp>" where layers are divided. Rank 0
has the results: {"<mesh> <case>": the largest relative error}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from forge.rl.config import MeshShape
from forge.rl.parallel.world import World, make_world

Cases = Callable[[str, World], dict[str, float]]


def sizes_of(mesh: str) -> MeshShape:
    """The mesh of a name."""
    replicate, shard, cp, tp = [*map(int, mesh.split("x")), 1][:4]
    return MeshShape(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)


def print_cases(meshes: Mapping[int, Sequence[str]], cases: Cases) -> None:
    """As a rank of torchrun: compute the cases on the meshes that the arguments name, or on all of
    this number of ranks; rank 0 prints one JSON object."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, float] = {}
    for mesh in sys.argv[1:] or meshes[int(os.environ["WORLD_SIZE"])]:
        found |= cases(mesh, make_world(sizes_of(mesh), torch.device("cpu")))
    if not dist.get_rank():
        print(json.dumps(found))
    dist.destroy_process_group()


def write_cases(mesh: str, cases: Cases, *, rank: int, meeting: str, results: str) -> None:
    """As a fork: compute the cases on one mesh with the other forks, which meet in the file
    `meeting`; rank 0 writes them to the file `results`."""
    torch.set_num_threads(1)
    shape = sizes_of(mesh)
    store = dist.FileStore(meeting, shape.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=shape.ranks)
    found = cases(mesh, make_world(shape, torch.device("cpu")))
    if not rank:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()
