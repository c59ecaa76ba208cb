"""The time that the queue goes by: only time during which this scheduler could listen.

A scheduler that was stopped for a while, by its host or by its own work, could not hear runners
that renewed meanwhile. Their claims, a trainer's batch and every back-off are that much longer.
"""

from __future__ import annotations

from collections.abc import Callable


class ListeningClock:
    """Monotonic seconds, without the pauses that it is told of."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deaf_s = 0.0

    def __call__(self) -> float:
        return self._clock() - self._deaf_s

    def missed(self, pause_s: float) -> None:
        """For so long, up to now, nobody was listened to."""
        self._deaf_s += max(0.0, pause_s)
