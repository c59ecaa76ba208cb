"""Memory that does not suffice: how it is recognized, what is tried next, and what saves it.

Owns nothing of a step; `forge.rl.learner.learner` does the trying.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

SHRINK = 0.5
"""Factor on the token budget when a pass did not fit."""

_PHRASES = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
"""What allocators say, in a RuntimeError: the CPU's, CUDA's, cuBLAS's."""


def memory_shortage(error: BaseException) -> str:
    """What an error says about memory, in one line; "" when it is about something else."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if known or (isinstance(error, RuntimeError) and any(p in str(error) for p in _PHRASES)):
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def smaller_budgets(budget: int, *, floor: int) -> list[int]:
    """What to try after a pass of `budget` tokens, largest first; the last one is the floor."""
    budgets = []
    while budget > floor:
        budget = max(floor, int(budget * SHRINK))
        budgets.append(budget)
    return budgets


def recompute_activations(model: Any) -> None:
    """Have each layer computed again on the way back, instead of keeping what is inside it.

    Layers alone go into training mode, without which transformers keeps all: what is in them does
    not, so no dropout begins. Raises `ValueError` when the model cannot.
    """
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name from 5.20 or so
    (enable or model.gradient_checkpointing_enable)()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
