"""Pauses between retries. Not here: jitter and deadlines, which each caller adds."""

from __future__ import annotations


class Backoff:
    """Exponential back-off from `first_s` to `max_s`."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._max_s = max_s

    def next_s(self) -> float:
        """Return the next pause; each is twice the last one."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return pause_s

    def reset(self) -> None:
        """Start again with `first_s`."""
        self._next_s = self._first_s
