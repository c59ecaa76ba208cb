"""Keys and values of a rank's prefix, gathered from other ranks."""

from __future__ import annotations

from unittest.mock import sentinel

import pytest
import torch
from torch import Tensor

from forge.rl.parallel import context_parallel
from forge.rl.parallel.context_parallel import GatheredPrefix
from forge.rl.tree.kv_relay import shared_slots


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
def test_keys_and_values_have_the_type_of_the_values(
    narrow: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and rotary make keys of 32 bits beside values of 16; values of 32 would make attention
    compute in 32."""
    exchanged: list[torch.dtype] = []

    def sum_with_the_first(tensor: Tensor, group: object) -> None:
        exchanged.append(tensor.dtype)
        tensor[:, :, 0] += 1

    monkeypatch.setattr(context_parallel, "all_reduce", sum_with_the_first)
    slots = shared_slots([(0, 2), (2, 5)], [torch.zeros(0, dtype=torch.long), torch.tensor([0])])
    prefix = GatheredPrefix(group=sentinel.group, slots=slots[1], size=1)
    key = torch.randn(1, 2, 3, 4, requires_grad=True)
    value = torch.randn(1, 2, 3, 6).to(narrow).requires_grad_()
    keys, values = prefix.extend(0, key, value)
    assert (keys.dtype, values.dtype, exchanged) == (narrow, narrow, [narrow])
    assert torch.equal(values, torch.cat([torch.ones(1, 2, 1, 6, dtype=narrow), value], dim=2))
    (keys.sum() + values.sum()).backward()
    assert key.grad is not None and torch.equal(key.grad, torch.ones_like(key))
    assert value.grad is not None and torch.equal(value.grad, torch.ones_like(value))
