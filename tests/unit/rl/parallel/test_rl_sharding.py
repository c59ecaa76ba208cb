"""What `shard` refuses."""

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
