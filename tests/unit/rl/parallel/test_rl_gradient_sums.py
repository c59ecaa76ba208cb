"""Sums of gradients over ranks, with few exchanges."""

from __future__ import annotations

from unittest.mock import sentinel

import pytest
import torch
from torch import Tensor

from forge.rl.parallel import context_parallel


def test_small_gradients_are_summed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One exchange for a bucket of one type, none beyond its size; a parameter that no rank has a
    gradient of stays without one."""
    exchanged: list[int] = []

    def two_alike(tensor: Tensor, group: object, **_: object) -> None:
        exchanged.append(tensor.numel())
        tensor.mul_(2)

    monkeypatch.setattr(context_parallel, "all_reduce", two_alike)
    monkeypatch.setattr(context_parallel, "BUCKET_BYTES", 100)
    sizes = [(2, 3), (4,), (5, 5), (30,), (3,), (3,)]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    parameters[4] = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameters.append(torch.nn.Parameter(torch.zeros(7)))
    for number, one in enumerate(parameters[:6], start=1):
        one.grad = torch.full_like(one, number)
    parameters[0].grad = torch.ones(3, 2).mT  # not contiguous
    context_parallel.sum_gradients(parameters, sentinel.group)
    assert exchanged == [7, 10, 25, 30, 3, 3]
    for number, one in enumerate(parameters[:6], start=1):
        assert one.grad is not None and torch.equal(one.grad, torch.full_like(one.grad, 2 * number))
    assert parameters[6].grad is None
