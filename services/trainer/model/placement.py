"""Device and type in which a model computes, and its activation checkpointing.

Owns the meaning of the settings `autocast`, `recompute_activations` and `compile_layers`;
`forge.rl.device` that of `device`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.model.compiled import compile_layers
from forge.rl.model.precision import computes_bfloat16
from forge.rl.model.recomputation import recompute_activations
from services.trainer.config import TrainerConfig
from services.trainer.torchrun_rank import under_torchrun


def recompute(model: Any, *, share: float = 1.0) -> None:
    """Keep only the inputs of a share of the layers. Raises `ConfigError` when the model cannot."""
    try:
        recompute_activations(model, share=share)
    except ValueError as error:
        raise ConfigError(
            f"recompute_activations = true is not allowed for this model: {error}"
        ) from None


def compile_for_trees(model: Any, *, autocast: torch.dtype | None) -> None:
    """Compile the layers. Raises `ConfigError` for a model or a setting that does not allow it."""
    try:
        if autocast is None:
            raise InvalidArgument("it needs autocast = 'bfloat16'")
        compile_layers(model)
    except InvalidArgument as error:
        raise ConfigError(f"compile_layers = true is not allowed: {error}") from None


def local_rank(rank: int) -> int:
    """Number of a rank on its host: under torchrun there may be several hosts."""
    return int(os.environ["LOCAL_RANK"]) if under_torchrun() else rank


def computed_type(config: TrainerConfig) -> str:
    """Name of the type in which this process computes the backbone."""
    narrow = backbone_dtype(config.autocast, torch.device(config.device))
    return str(narrow or torch.float32).removeprefix("torch.")


def backbone_dtype(setting: str, device: torch.device) -> torch.dtype | None:
    """The autocast type of the backbone; None: the type of the master weights."""
    wanted = setting == "bfloat16" or (setting == "auto" and computes_bfloat16(device))
    return torch.bfloat16 if wanted else None
