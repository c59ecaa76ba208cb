"""Out-of-memory errors: their recognition, and smaller budgets to retry with.

`forge.rl.learner.token_budget` lowers the budget of a learner.
"""

from __future__ import annotations

import torch

SHRINK = 0.5
"""Factor on the token budget after a shortage of memory."""

_PHRASES = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Parts of the RuntimeErrors of allocators: the CPU's, CUDA's, cuBLAS's."""


def memory_shortage(error: BaseException) -> str:
    """The first line of an out-of-memory error; "" for other errors."""
    typed = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if typed or (isinstance(error, RuntimeError) and any(p in str(error) for p in _PHRASES)):
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def smaller_budgets(budget: int, *, floor: int) -> list[int]:
    """Budgets to try after a pass of `budget` tokens, largest first; the last is the floor."""
    budgets = []
    while budget > floor:
        budget = max(floor, int(budget * SHRINK))
        budgets.append(budget)
    return budgets
