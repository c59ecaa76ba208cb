"""Attempts that were lost while other rollouts succeeded, charged to the task.

Owns the charge of a lease that expired without a report: a task that exhausts its runner's host
loses its runner each time. A late runner reports in the end, which removes the charge.
`forge.core.queue.rollouts` limits the losses.
"""

from __future__ import annotations

from forge.core.queue.groups import Rollout

MOST_SILENT = 65_536
"""Most remembered attempts of silent runners."""


class Losses:
    """Charges that a report may remove."""

    def __init__(self) -> None:
        self._silent: dict[str, Rollout] = {}
        """Rollouts by attempt, the oldest first."""

    def charge(self, rollout: Rollout, *, silent: str = "") -> None:
        """One more loss; `silent`: the attempt, if its runner has not reported its end."""
        rollout.losses += 1
        if not silent:
            return
        if len(self._silent) >= MOST_SILENT:
            del self._silent[next(iter(self._silent))]
        self._silent[silent] = rollout

    def heard_of(self, attempt: str) -> None:
        """Notes that the runner of the attempt reported."""
        if rollout := self._silent.pop(attempt, None):
            rollout.losses -= 1
