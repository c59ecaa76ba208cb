"""Attempts that were lost while other rollouts succeeded, charged to the task.

Owns the charge of a claim that ended without a word: a task that uses up its runner's host loses
its runner each time. A runner that was only late, because its host ran it late, speaks of the claim
in the end, and takes the charge back. How many losses end a task is `forge.core.queue.rollouts`'
rule.
"""

from __future__ import annotations

from forge.core.queue.groups import Rollout

MOST_SILENT = 65_536
"""Attempts remembered whose runners gave no sign of life."""


class Losses:
    """What rollouts were charged with, for as long as it may be taken back."""

    def __init__(self) -> None:
        self._silent: dict[str, Rollout] = {}
        """By attempt, the oldest first."""

    def charge(self, rollout: Rollout, *, silent: str = "") -> None:
        """One more loss; `silent` names the attempt if its runner has not spoken of its end."""
        rollout.losses += 1
        if not silent:
            return
        if len(self._silent) >= MOST_SILENT:
            del self._silent[next(iter(self._silent))]
        self._silent[silent] = rollout

    def heard_of(self, attempt: str) -> None:
        """Its runner speaks of the attempt."""
        if rollout := self._silent.pop(attempt, None):
            rollout.losses -= 1
