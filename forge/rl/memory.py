"""Memory that does not suffice: how it is recognized, and what is tried next.

Owns nothing of a step; `forge.rl.learner` does the trying.
"""

from __future__ import annotations

import torch

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
