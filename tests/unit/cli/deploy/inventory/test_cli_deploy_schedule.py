"""The time of a backup's timer, as `forge deploy render` checks it."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.cli.deploy.inventory.schedule import check_schedule, schedule_fault

NOW = datetime.now(UTC)
SYSTEMD = shutil.which("systemd-analyze")
RIGHT = (
    *("hourly", "daily UTC", "*-*-* 04:00", "*:*:0/20", "Mon..Fri 04:00", "04:00 Europe/Berlin"),
    *("mon,wed *-*-01 04:00:30.5 UTC", "*-02-29", "*-02~03", "01-01", "Sunday", "*-1,7-1"),
    *("12/6:00", "*:50/9", "21..23/2:0", "1,2..4,5/6:00", "*-*-01..05", "*:0:0/1.5"),
)
WRONG = {
    "25:00": "the hour '25' is not within 0..23",
    "*:60": "the minute '60' is not within 0..59",
    "04:00:60": "the second '60' is not within 0..59",
    "*-13-01": "the month '13' is not within 1..12",
    "*-*-05..01": "the day '05..01' is not within 1..31",
    "*/2:00": "the hour '*/2' is not *, a number, A..B or A/STEP",
    "*:0/0": "the minute '0/0' has a step that never matches",
    "*:50/20": "the minute '50/20' has a step that never matches",
    "*-*-* 04": "'04' is not a time like 04:00 or 04:00:00",
    "4": "'4' is neither a date like *-*-01 nor a time like 04:00",
    "hourly daily": "'hourly' is neither a weekday nor a word like daily",
    "Sat..Mon 04:00": "the weekdays 'sat..mon' are not FIRST..LAST",
    "04:00 05:00": "'05:00' follows the time",
    "04:00 Europe/Forge": "'europe/forge' follows the time",
    "UTC": "it has no time",
    # systemd reads these, and the timer would never run.
    "*-02-30": "no such month has 30 days",
    "2020-01-01": "the date '2020-01-01' is over",
}


def systemd_runs(text: str) -> bool:
    """Whether systemd reads a time, and knows when it comes next."""
    command = ["systemd-analyze", "calendar", "--", text]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return not shown.returncode and "elapse: never" not in shown.stdout


@pytest.mark.parametrize("text", RIGHT)
def test_time_of_systemd_is_right(text: str) -> None:
    """Also where there is no systemd; where there is one, it agrees."""
    check_schedule(text, now=NOW)
    assert not SYSTEMD or systemd_runs(text)


@pytest.mark.parametrize(("text", "reason"), WRONG.items())
def test_wrong_time_has_a_reason(text: str, reason: str) -> None:
    """It names the part; a timer that would never run is wrong too."""
    assert reason in schedule_fault(text)
    assert not SYSTEMD or not systemd_runs(text)


@pytest.mark.parametrize("text", ["", "hourly\nUser=root", "%h", "daily; reboot"])
def test_time_has_no_character_of_another_line(text: str) -> None:
    """It becomes a line of a unit."""
    assert schedule_fault(text).startswith("a time of systemd")


@pytest.mark.skipif(not SYSTEMD, reason="systemd-analyze is not installed")
def test_form_that_systemd_alone_knows_is_right() -> None:
    """A weekday range of old, and a range of one."""
    assert schedule_fault("Mon-Fri 04:00") == "" and schedule_fault("*:5..5") == ""


def test_form_that_systemd_alone_knows_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a computer without it the form is refused, with what is allowed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "'mon-fri' is neither a weekday" in schedule_fault("Mon-Fri 04:00")


_NUMBER = st.integers(0, 61).map(str)
_PART = st.one_of(
    st.just("*"),
    _NUMBER,
    st.builds("{}..{}".format, _NUMBER, _NUMBER),
    st.builds("{}/{}".format, _NUMBER, _NUMBER),
    st.builds("{}..{}/{},{}".format, _NUMBER, _NUMBER, _NUMBER, _NUMBER),
)
_TIMES = st.one_of(
    st.builds("{}:{}:{}".format, _PART, _PART, _PART),
    st.builds("*-{}-{} {}:{}".format, _PART, _PART, _PART, _PART),
    st.builds("*-{}~{}".format, _PART, _PART),
)


@pytest.mark.skipif(not SYSTEMD, reason="systemd-analyze is not installed")
@given(_TIMES)
def test_accepted_time_is_one_of_systemd(text: str) -> None:
    """Whatever is accepted here, a timer of systemd runs by."""
    try:
        check_schedule(text, now=NOW)
    except ValueError:
        return
    assert systemd_runs(text), text
