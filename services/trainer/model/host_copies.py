"""Copies of tensors in host memory, for publication and checkpoints, made before the next step
changes them.

Owns how a device tensor gets there: rounded on the device, which halves its bytes, into memory that
the device writes without the processor (pinned). torch keeps freed pinned memory for later copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from forge.core.errors import first_line
from forge.runtime.telemetry import log

Allocate = Callable[[torch.Size, torch.dtype], Tensor]
"""Returns a contiguous tensor in host memory, not initialized."""


def host_copies(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Contiguous copies in `dtype`, by name. Those of a device are complete once the iterator has
    ended."""
    device: torch.device | None = None
    for name, tensor in tensors:
        device = tensor.device
        yield name, host_copy(tensor, dtype)
    if device is not None:
        finish_copies(device)


def host_copy(
    tensor: Tensor, dtype: torch.dtype | None = None, *, empty: Allocate | None = None
) -> Tensor:
    """A contiguous copy in `dtype`, or in the tensor's own type; that of a device's tensor is
    complete after `finish_copies`. `empty` allocates its memory."""
    tensor = tensor.detach()
    wanted = dtype or tensor.dtype
    if tensor.is_cuda:
        return (empty or _pinned)(tensor.shape, wanted).copy_(tensor.to(wanted), non_blocking=True)
    return (empty or _pageable)(tensor.shape, wanted).copy_(tensor)


def finish_copies(device: torch.device) -> None:
    """Wait for the copies from a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _pageable(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        log.warning("host_memory_not_pinned", error=first_line(error))
        return torch.empty(shape, dtype=dtype)
