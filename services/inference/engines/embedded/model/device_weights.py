"""Weights of a GPU: one copy there, at fixed addresses; new ones wait in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def host_copy(received: torch.Tensor, served: torch.dtype) -> torch.Tensor:
    """Return a copy in pinned memory, in the narrower of its own type and the served one: less to
    move to the device."""
    narrower = received.dtype if received.dtype.itemsize <= served.itemsize else served
    return received.to(narrower).pin_memory()


def overwrite(served: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy pinned tensors to the served ones on the device's stream; no tensors change nothing.
    Keep the tensors until the device has finished."""
    if not tensors:
        return
    for target, tensor in zip(served, tensors, strict=True):
        # Widened there: across devices `copy_` would convert on the host.
        target.data.copy_(tensor.to(target.device, non_blocking=True))
