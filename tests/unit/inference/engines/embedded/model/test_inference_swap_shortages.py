"""A swap of weights that runs out of memory half-way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.core.errors import ResourceExhausted
from services.inference.engines.embedded.model import policy as policy_module
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.probe import adopt
from tests.contract import engines


def test_swap_without_memory_leaves_the_weights_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, which has one copy: some tensors are overwritten when the memory for the copy of
    the next one is missing. Another attempt serves the new ones."""
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype="float32", device="cpu")
    policy._on_host = ()
    room = [1 << 30]

    def overwrite(served: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        for target, tensor in zip(served, tensors, strict=bool(tensors)):
            room[0] -= 1
            if room[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            target.data.copy_(tensor)

    monkeypatch.setattr(policy_module, "overwrite", overwrite)
    monkeypatch.setattr(policy_module, "host_copy", lambda tensor, dtype: tensor.to(dtype).clone())
    old, new = (engines.published(engines.reference("qwen3", seed=seed)) for seed in (0, 1))
    adopt(policy, policy.stage(old, version=1), None)
    values = [one.clone() for one in policy.module.parameters()]
    room[0] = 3
    staged = policy.stage(new, version=2)
    with pytest.raises(ResourceExhausted, match="weights 2: no memory"):
        adopt(policy, staged, None)
    assert policy.version == 1
    assert all(map(torch.equal, values, policy.module.parameters()))
    adopt(policy, staged, None)
    assert policy.version == 2
    assert not all(map(torch.equal, values, policy.module.parameters()))
