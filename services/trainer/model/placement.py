"""Where a model computes, in what type, and what of it is kept for the way back.

Owns what the settings `device`, `autocast` and `recompute_activations` amount to.
"""

from __future__ import annotations

from typing import Any

import torch

from forge.core.errors import ConfigError
from forge.rl.model.precision import computes_bfloat16
from forge.rl.out_of_memory import recompute_activations


def recompute(model: Any) -> None:
    """Keep of a layer what goes into it. Raises `ConfigError` when the model cannot."""
    try:
        recompute_activations(model)
    except ValueError as error:
        raise ConfigError(f"recompute_activations = true is not for this model: {error}") from None


def device_of(setting: str, *, rank: int = 0) -> torch.device:
    """That of a rank. Raises `ConfigError` when there is none."""
    try:
        device = torch.device("cuda", rank) if setting == "cuda" else torch.device(setting)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = {setting!r} cannot be had on rank {rank}: {reason}") from error
    return device


def trunk_type(setting: str, device: torch.device) -> torch.dtype | None:
    """None: the master weights' own."""
    wanted = setting == "bfloat16" or (setting == "auto" and computes_bfloat16(device))
    return torch.bfloat16 if wanted else None
