"""The torch device that a setting names.

Owns the meaning of `device` in the trainer and the embedded engine, and the error of a device that
this host lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge.core.errors import ConfigError, first_line

if TYPE_CHECKING:
    import torch


def device_of(setting: str, *, rank: int = 0) -> torch.device:
    """Returns the device of a rank: with "cuda" each has the GPU of its number. Raises
    `ConfigError` if it does not exist."""
    # Here, since a start reads its settings before it imports torch.
    import torch

    try:
        device = torch.device("cuda", rank) if setting == "cuda" else torch.device(setting)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device = {setting!r} is not available on rank {rank}: {first_line(error)}. Install "
            "NVIDIA's driver and a torch for CUDA, check CUDA_VISIBLE_DEVICES, or set device = "
            "'cpu'"
        ) from error
    return device
