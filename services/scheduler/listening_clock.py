"""The clock of the queue: it excludes time in which the scheduler could not read messages.

A scheduler that its host or its own work paused did not receive renewals. This clock extends every
lease, batch and back-off by such pauses.
"""

from __future__ import annotations

from collections.abc import Callable


class ListeningClock:
    """Monotonic seconds without the pauses reported to `missed`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deaf_s = 0.0

    def __call__(self) -> float:
        """The time now."""
        return self._clock() - self._deaf_s

    def missed(self, pause_s: float) -> None:
        """Exclude a pause that ends now."""
        self._deaf_s += max(0.0, pause_s)
