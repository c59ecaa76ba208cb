"""Duration of leases by runner: a runner on a loaded host renews late.

Owns the longest recent pause between two renewals of one lease, for each runner.
"""

from __future__ import annotations

from dataclasses import dataclass

PAUSES = 3.0
"""Duration of a lease, in longest recent pauses: a runner renews each third of a lease."""
MOST_LEASES = 10.0
"""Longest duration, in leases of a runner that renews in time."""
REMEMBERED_LEASES = 20.0
"""Leases for which a pause is recent."""
MOST_RUNNERS = 16_384


@dataclass(slots=True)
class _Pause:
    longest_s: float
    seen_s: float


class Renewals:
    """The pauses of every runner."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._pauses: dict[str, _Pause] = {}

    def renewed(self, runner_id: str, *, pause_s: float, now_s: float) -> None:
        """Notes that a lease was renewed `pause_s` after its last renewal."""
        known = self._pauses.get(runner_id)
        if known is None and len(self._pauses) >= MOST_RUNNERS:
            self._pauses.clear()
        outdated = known and now_s - known.seen_s > REMEMBERED_LEASES * self._lease_s
        if known is None or outdated or pause_s >= known.longest_s:
            self._pauses[runner_id] = _Pause(pause_s, now_s)

    def lease_s(self, runner_id: str) -> float:
        """Duration of a lease of the runner from now on."""
        known = self._pauses.get(runner_id)
        if known is None:
            return self._lease_s
        return min(max(self._lease_s, PAUSES * known.longest_s), MOST_LEASES * self._lease_s)
