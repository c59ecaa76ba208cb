"""Which clock is off is what most clocks say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.core.clocks import AGREE_S, Clock, compare


def clocks(**offsets_s: float) -> list[Clock]:
    return [Clock(name=name, offset_s=offset_s) for name, offset_s in offsets_s.items()]


def test_every_observer_names_the_clock_that_differs() -> None:
    """Also if it is the observer's own."""
    for seen in (clocks(me=0, b=0.2, c=7200), clocks(c=0, me=-7200, b=-7199.8)):
        (line,) = compare(seen).lines()
        assert line == "the clock of c is 7200 s ahead of the others"
    (line,) = compare(clocks(me=0, b=1, slow=-90)).lines()
    assert line == "the clock of slow is 90 s behind the others"


def test_two_clocks_that_differ_are_both_named() -> None:
    """The line says that either may be right."""
    found = compare(clocks(me=0, b=60))
    assert not found.decided
    assert found.lines() == [
        "the clock of b is 60 s ahead of that of me; which one is right is unknown"
    ]


def test_difference_within_the_measurement_error_is_ignored() -> None:
    """A difference within the error of its measurement is none."""
    slow = Clock(name="busy", offset_s=AGREE_S + 3, error_s=4)
    assert compare([*clocks(me=0, b=0), slow]).off == ()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), st.floats(-1e6, 1e6))
def test_result_does_not_depend_on_the_observers_clock(
    offsets_s: list[float], shift_s: float
) -> None:
    """Which clocks are wrong is the same for offsets relative to any clock."""
    names = [str(at) for at in range(len(offsets_s))]
    rounded = [round(offset_s) for offset_s in offsets_s]
    one = compare([Clock(name=n, offset_s=o) for n, o in zip(names, rounded, strict=True)])
    other = compare(
        [Clock(name=n, offset_s=o + round(shift_s)) for n, o in zip(names, rounded, strict=True)]
    )
    assert [clock.name for clock in one.off] == [clock.name for clock in other.off]
    assert one.decided == other.decided
