"""Which clocks of a cluster are off: every clock against the median of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGREE_S = 5.0
"""Clocks that differ by less agree; a call on a busy machine measures no better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One clock as an observer measured it."""

    name: str
    offset_s: float
    """This clock minus the observer's."""
    error_s: float = 0.0
    """The offset is exact to so much: half the round trip of the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Some clocks against their median."""

    reference: Clock
    """The median one."""
    off: tuple[Clock, ...]
    """Those that differ from the median, with their offset to it."""
    decided: bool
    """Whether most clocks agree with the median; otherwise nobody knows which are off."""

    def lines(self) -> list[str]:
        """One sentence for each clock that is off."""
        return [self._line(clock) for clock in self.off]

    def _line(self, clock: Clock) -> str:
        side = "ahead of" if clock.offset_s > 0 else "behind"
        differs = f"the clock of {clock.name} is {abs(clock.offset_s):.0f} s {side}"
        if self.decided:
            return f"{differs} the others"
        return f"{differs} that of {self.reference.name}; which one is right is unknown"


def compare(clocks: Sequence[Clock]) -> Comparison:
    """At least one clock, the observer's among them. The lower median decides a tie, so that
    every observer of the same clocks comes to the same result."""
    reference = sorted(clocks, key=lambda clock: clock.offset_s)[(len(clocks) - 1) // 2]
    off = tuple(
        Clock(name=clock.name, offset_s=clock.offset_s - reference.offset_s, error_s=clock.error_s)
        for clock in clocks
        if abs(clock.offset_s - reference.offset_s) > AGREE_S + clock.error_s + reference.error_s
    )
    decided = 2 * (len(clocks) - len(off)) > len(clocks)
    return Comparison(reference=reference, off=off, decided=decided)
