"""What `shard` refuses, and the dimension that it divides."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from forge.core.errors import InvalidArgument
from forge.rl.config import MeshShape
from forge.rl.parallel import sharding
from forge.rl.parallel.world import World


def test_torch_without_the_needed_methods_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the version, what it lacks, and the version that has it."""
    monkeypatch.setattr(sharding, "NEEDED", ("reset_iter_state", "future_method"))
    world = World(shape=MeshShape(dp_shard=2), meshes=cast(Any, object()))
    with pytest.raises(InvalidArgument, match=r"dp_shard = 2 .* FSDPModule.*future_method.* 2\.13"):
        sharding.shard(sharding.Entry(torch.nn.Linear(1, 1)), world)


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((151_936, 4096), 1024, 0),  # padding of less than a hundredth
        ((512, 4096), 1024, 1),  # keys of four heads
        ((128, 3072, 4096), 1024, 1),  # more ranks than experts
        ((128, 1536, 2048), 1024, 2),
        ((128, 3072, 4096), 64, 0),
        ((5, 6, 7), 4, 0),  # no dimension is a multiple
        ((128,), 1024, 0),
    ],
)
def test_dimension_without_much_padding_is_divided(
    shape: tuple[int, ...], shards: int, dim: int
) -> None:
    """FSDP pads the first dimension on every rank, in memory and in each gather."""
    parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
    assert sharding._place(parameter, shards=shards).dim == dim
