"""The text of a time, and the wrong clocks of a cluster: those that differ from the median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

AGREE_S = 5.0
"""Clocks that differ by less agree; a measurement on a busy machine is no more precise."""


def time_text(unix_s: float) -> str:
    """Return a Unix time for people, in UTC, such as 2026-01-31T12:00:00Z."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, ValueError, OSError):
        # Beyond the years of a date.
        return f"{unix_s:g} s since 1970"


def local_time_text(unix_s: float) -> str:
    """Return a Unix time for people, in the local time zone, such as 2026-01-31 12:00:00."""
    return f"{datetime.fromtimestamp(unix_s, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One clock, measured by an observer."""

    name: str
    offset_s: float
    """This clock minus the observer's."""
    error_s: float = 0.0
    """Error of the offset: half the round trip of the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Clocks compared with their median."""

    reference: Clock
    """The median clock."""
    off: tuple[Clock, ...]
    """Clocks that differ from the median, with their offset from it."""
    decided: bool
    """Whether most clocks agree with the median; otherwise the wrong clocks are unknown."""

    def lines(self) -> list[str]:
        """Return one sentence per wrong clock."""
        return [self._line(clock) for clock in self.off]

    def _line(self, clock: Clock) -> str:
        side = "ahead of" if clock.offset_s > 0 else "behind"
        differs = f"the clock of {clock.name} is {abs(clock.offset_s):.0f} s {side}"
        if self.decided:
            return f"{differs} the others"
        return f"{differs} that of {self.reference.name}; which one is right is unknown"


def compare(clocks: Sequence[Clock]) -> Comparison:
    """Compare clocks, the observer's among them. The lower median decides a tie, so that all
    observers of the same clocks get the same result."""
    reference = sorted(clocks, key=lambda clock: clock.offset_s)[(len(clocks) - 1) // 2]
    off = tuple(
        Clock(name=clock.name, offset_s=clock.offset_s - reference.offset_s, error_s=clock.error_s)
        for clock in clocks
        if abs(clock.offset_s - reference.offset_s) > AGREE_S + clock.error_s + reference.error_s
    )
    decided = 2 * (len(clocks) - len(off)) > len(clocks)
    return Comparison(reference=reference, off=off, decided=decided)
