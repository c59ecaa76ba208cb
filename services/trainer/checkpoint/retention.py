"""Retention of a run's checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRetention:
    """The rule; `services.trainer.checkpoint.store` removes the others."""

    last: int = 2
    """Newest checkpoints that are kept."""
    every_steps: int = 0
    """The first checkpoint at or after each multiple of it is kept for good; 0: none."""

    def newest(self, steps: Collection[int]) -> list[int]:
        """The steps of the newest checkpoints, the oldest first."""
        return sorted(steps)[-self.last :]

    def kept(self, steps: Collection[int]) -> set[int]:
        """The steps of the checkpoints to keep, of those that exist. To remove the others changes
        nothing about those that are kept."""
        kept = set(self.newest(steps))
        firsts: dict[int, int] = {}
        for step in sorted(steps) if self.every_steps else ():
            firsts.setdefault(step // self.every_steps, step)
        firsts.pop(0, None)
        return kept | set(firsts.values())
